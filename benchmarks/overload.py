"""More load than fits: the real service with the tiny pair, 8 sequences at a time and 8 in the queue.

`make bench BENCH=overload`: long requests offered at 50 per second for 60 s (`QUICK=1`: 15 s), then 400 at the same
instant (`QUICK=1`: too). Whoever is refused should hear of it at once; whoever is admitted must finish with the ids of
its solo run; the memory of all processes stays flat, compared with what it is after a first burst of 400 that is not
counted; afterwards all KV is free. Exits with 1 if an answer is wrong.

A request that waits in the queue is admitted: it is never refused later. So what is not refused within 3 s of the
instant must be answered in the end.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.idle import wait_until_idle
from benchmarks.load import SEEDED, completion_body, run_load
from benchmarks.processes import rss_mib
from benchmarks.raw_http import Answer, BrokenAnswerError, ask
from models.corpus import held_out_prompts

RUNNING, WAITING = 8, 8
PER_SECOND, SECONDS, FEW_SECONDS = 50, 60, 15
AT_ONCE = 400
AIM_REFUSED_MS, AIM_DECIDED_S, AIM_FLAT = 100.0, 3.0, 1.05
KINDS, MAX_TOKENS = 16, 200
ANSWER_TIMEOUT_S = 240.0
SAMPLE_S = 2.0
REFUSED, ADMITTED = 429, 200


@dataclass(slots=True)
class Outcomes:
    """What became of the requests of one phase: answers by the kind of the request, and those that broke."""

    refused: list[Answer] = field(default_factory=list)
    admitted: list[tuple[int, Answer]] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    def add(self, kind: int, answer: Answer) -> None:
        """Sort an answer in."""
        if answer.status == REFUSED and "retry-after" in answer.headers:
            self.refused.append(answer)
        elif answer.status == ADMITTED:
            self.admitted.append((kind, answer))
        else:
            self.others[f"status {answer.status}"] += 1

    @property
    def refused_ms(self) -> list[float]:
        """How long each refusal took, the connection included."""
        return [1e3 * (answer.head_s - answer.began_s) for answer in self.refused]

    def wrong(self, alone: Sequence[Sequence[int]]) -> int:
        """How many admitted requests did not finish with the ids of their solo run."""
        return sum(answer.token_ids != alone[kind] or not answer.finish_reason for kind, answer in self.admitted)


def bodies() -> list[dict[str, Any]]:
    """The kinds of requests, each with its own prompt and seed."""
    return [
        completion_body(prompt, SEEDED | {"seed": kind, "ignore_eos": True}, True, MAX_TOKENS)
        for kind, prompt in enumerate(held_out_prompts(KINDS))
    ]


async def offer(url: str, requests: int, per_second: float | None) -> Outcomes:
    """Send requests at a fixed rate, however slow the answers, or all at the same instant; wait for every answer."""
    outcomes, kinds = Outcomes(), bodies()

    async def one(number: int) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                outcomes.add(number % KINDS, await ask(url, kinds[number % KINDS] | {"stream": True}))
        except (BrokenAnswerError, OSError, TimeoutError) as error:
            outcomes.others[f"{type(error).__name__}: {error}"] += 1

    began, tasks = time.monotonic(), []
    for number in range(requests):
        if per_second is not None:
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    return outcomes


async def with_memory(service: Service, load: Any) -> tuple[Outcomes, Counter[str]]:
    """Return what came of `load`, and the most memory that each role had meanwhile."""
    most: Counter[str] = Counter()

    async def sample() -> None:
        while True:
            for role, mib in (await asyncio.to_thread(rss_mib, service.process.pid)).items():
                most[role] = max(most[role], mib)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        return await load, most
    finally:
        sampling.cancel()


def phase_rows(name: str, outcomes: Outcomes, alone: Sequence[Sequence[int]], decided: float | None) -> list[Row]:
    """Word one phase. With `decided`, refusals are held against it in seconds, else against the aim in milliseconds."""
    refused = outcomes.refused_ms or [0.0]
    rows = [
        Row(f"{name}: admitted", len(outcomes.admitted), "requests"),
        Row(f"{name}: refused", len(outcomes.refused), "requests"),
        Row(f"{name}: answered otherwise", sum(outcomes.others.values()), "requests", bound=0),
        Row(f"{name}: admitted, not as alone", outcomes.wrong(alone), "requests", bound=0),
    ]
    if decided is None:
        median_ms = median(refused)
        rows.append(Row(f"{name}: refusal, median", median_ms, "ms", AIM_REFUSED_MS, median_ms / AIM_REFUSED_MS))
        rows.append(Row(f"{name}: refusal, 99 %", quantiles(refused * 2, n=100)[-1], "ms"))
    else:
        slowest_s = max(refused) / 1e3
        rows.append(Row(f"{name}: refusal, median", median(refused) / 1e3, "s"))
        rows.append(Row(f"{name}: refusal, slowest", slowest_s, "s", decided, slowest_s / decided))
    return rows


def memory_rows(before: Counter[str], during: Counter[str], after: Counter[str]) -> list[Row]:
    """Word the memory; what it was before is the bound of what it is after."""
    rows: list[Row] = []
    for role in sorted(before, key=lambda role: -before[role]):
        ratio = after[role] / before[role]
        rows.append(Row(f"RSS of {role}: before", before[role], "MiB"))
        rows.append(Row(f"RSS of {role}: most during", during[role], "MiB"))
        rows.append(Row(f"RSS of {role}: after", after[role], "MiB", AIM_FLAT * before[role], ratio / AIM_FLAT))
    return rows


async def overload(service: Service, seconds: int, alone: Sequence[Sequence[int]]) -> tuple[list[Row], list[Outcomes]]:
    """Offer too much for a while, then at one instant."""
    before = rss_mib(service.process.pid)
    steady, most = await with_memory(service, offer(service.url, PER_SECOND * seconds, PER_SECOND))
    instant, most_then = await with_memory(service, offer(service.url, AT_ONCE, None))
    most = most | most_then
    left = await asyncio.to_thread(wait_until_idle, service)
    after = rss_mib(service.process.pid)
    rows = [
        *phase_rows(f"{PER_SECOND} per second for {seconds} s", steady, alone, None),
        *phase_rows(f"{AT_ONCE} at once", instant, alone, AIM_DECIDED_S),
        *left.rows(),
        *memory_rows(before, most, after),
    ]
    return rows, [steady, instant]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    seconds = FEW_SECONDS if parser.parse_args().quick else SECONDS
    config = tiny_pair_config(
        router={"max_running_sequences": RUNNING, "max_waiting_sequences": WAITING, "queue_timeout_s": 200.0},
        target={"kv_cache_gib": 0.0625},
        drafters={"kv_cache_gib": 0.03125},
    )
    with running_service(config) as service:
        alone = run_load(service, bodies(), 1).token_ids
        # Touches every KV block, and buffers for as many connections, so that memory that grows afterwards is a leak.
        asyncio.run(offer(service.url, AT_ONCE, None))
        rows, phases = asyncio.run(overload(service, seconds, alone))
    report("overload", rows)
    for phase in phases:
        if phase.others or phase.wrong(alone):
            raise SystemExit(f"wrong answers: {phase.wrong(alone)} not as alone, {dict(phase.others)}")


if __name__ == "__main__":
    main()
