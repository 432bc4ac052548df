"""The embedded pair through HTTP: speed with and without speculation, and where the time of a round goes.

`make bench BENCH=pair` (about six minutes), `QUICK=1` for two.
"""

import argparse
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.load import GREEDY, SEEDED, LoadResult, completion_body, run_load
from models.corpus import held_out_prompts

SAMPLINGS = {"greedy": GREEDY, "temperature 0.8": SEEDED}


def measure(service: Service, prompts: list[str], repeats: int, max_tokens: int) -> Iterator[Row]:
    """Yield rows for every concurrency and sampling; on and off take turns, so that drift of the machine cancels."""
    for concurrency in (1, 4, 16):
        for name, sampling in SAMPLINGS.items():
            case = f"{name}, concurrency {concurrency}"
            results: dict[bool, list[LoadResult]] = {True: [], False: []}
            shares: list[dict[str, float]] = []
            for _ in range(repeats):
                for speculation in (False, True):
                    before = service.status()["totals"]
                    bodies = [completion_body(prompt, sampling, speculation, max_tokens) for prompt in prompts]
                    results[speculation].append(run_load(service, bodies, concurrency))
                    if speculation:
                        shares.append(round_shares(before, service.status()["totals"]))
            plain = median(result.tokens_per_s for result in results[False])
            drafted = median(result.tokens_per_s for result in results[True])
            ratios = [on.tokens_per_s / off.tokens_per_s for on, off in zip(results[True], results[False], strict=True)]
            yield Row(f"{case}: plain decoding", plain, "tok/s")
            yield Row(f"{case}: speculation", drafted, "tok/s", ratio=median(ratios))
            yield Row(f"{case}: accepted length", median(r.accepted_length for r in results[True]), "tokens", bound=5.0)
            for share in shares[0]:
                yield Row(f"{case}: {share}", median(entry[share] for entry in shares), "share of a round")


def round_shares(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Return the shares of the rounds between two statuses that drafting, verifying and all else took."""
    spent = {key: after[key] - before[key] for key in ("wall_ms", "draft_compute_ms", "verify_compute_ms")}
    draft, verify = spent["draft_compute_ms"] / spent["wall_ms"], spent["verify_compute_ms"] / spent["wall_ms"]
    return {"drafting": draft, "verifying": verify, "Ray and router": 1 - draft - verify}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    prompts = held_out_prompts(16)
    # The same prompts come again and again; whoever came later would find them cached.
    uncached = {"prefix_caching": False}
    with running_service(tiny_pair_config(target=uncached, drafters=uncached)) as service:
        run_load(service, [completion_body(prompt, GREEDY, True, 16) for prompt in prompts[:8]], concurrency=4)
        report("pair", list(measure(service, prompts, repeats=1 if quick else 3, max_tokens=64)))


if __name__ == "__main__":
    main()
