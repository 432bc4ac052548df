"""Ids with speculation against ids without, and two tensor-parallel ranks against one, on held-out prompts.

`make bench BENCH=lossless` asks 200 prompts (about six minutes), `QUICK=1` 40.
"""

import argparse

from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.load import GREEDY, SEEDED, LoadResult, completion_body, run_load
from models.corpus import held_out_prompts

SAMPLINGS = {"greedy": GREEDY, "temperature 0.8, seeded": SEEDED}
CONCURRENCY = 16
MAX_TOKENS = 64


# Four tokens in every round, whether that pays or not: as many verifications of drafts as there can be.
ALWAYS_DRAFTED = {"draft_length_policy": "fixed", "max_draft_tokens": 4, "bench_drafters": False, "draft_ahead": False}


def ask(service: Service, prompts: list[str], sampling: str, speculation: bool) -> LoadResult:
    """Complete every prompt."""
    bodies = [completion_body(prompt, SAMPLINGS[sampling], speculation, MAX_TOKENS) for prompt in prompts]
    return run_load(service, bodies, CONCURRENCY)


def differing(one: LoadResult, other: LoadResult) -> float:
    """Return how many answers differ in any id."""
    return float(sum(left != right for left, right in zip(one.token_ids, other.token_ids, strict=True)))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    prompts = held_out_prompts(40 if parser.parse_args().quick else 200)
    rows = []
    drafted: dict[str, LoadResult] = {}
    with running_service(tiny_pair_config(speculation=ALWAYS_DRAFTED)) as service:
        for sampling in SAMPLINGS:
            drafted[sampling] = ask(service, prompts, sampling, speculation=True)
            plain = ask(service, prompts, sampling, speculation=False)
            case = f"{sampling}, {len(prompts)} prompts"
            rows.append(
                Row(f"{case}: speculation on and off differ", differing(drafted[sampling], plain), "answers", 0)
            )
            rows.append(Row(f"{case}: accepted length", drafted[sampling].accepted_length, "tokens", bound=5.0))
    with running_service(tiny_pair_config(target={"tensor_parallel_size": 2}, speculation=ALWAYS_DRAFTED)) as two_ranks:
        for sampling in SAMPLINGS:
            split = ask(two_ranks, prompts, sampling, speculation=True)
            case = f"{sampling}, {len(prompts)} prompts"
            rows.append(Row(f"{case}: one and two ranks differ", differing(drafted[sampling], split), "answers", 0))
    report("lossless", rows)


if __name__ == "__main__":
    main()
