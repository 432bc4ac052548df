"""How long a stream is silent when what serves it is killed: a target, a drafter, the router, a rank, a whole node.

`make bench BENCH=recovery` kills each 20 times (`QUICK=1`: 3 times, and no node), always under a stream that it serves;
`ARGS="--kinds target,drafter --count 5"` chooses. What counts is the longest silence of the stream that begins within
a second of the kill, or was under way then, from the kill on. The text must be that of an undisturbed run.
"""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos import ServiceUnderTest, service_under_test, wait_until_whole
from benchmarks.chaos_faults import router_processes
from benchmarks.harness import Row, report
from benchmarks.load import SEEDED, completion_body
from benchmarks.raw_http import Answer, BrokenAnswerError, chunks, connected, read_head
from models.corpus import held_out_prompts

COUNT, FEW = 20, 3
MAX_TOKENS = 300
EVENTS_BEFORE = 10
BEGINS_WITHIN_S = 1.0
SETTLE_S = 2.0
AIMS_S = {"drafter": 0.2, "target": 1.0, "router": 5.0, "rank": 1.0}
RANKS = {"rank": 2}
KINDS = ("drafter", "target", "router", "rank", "node")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill: how long the stream was silent, and whether it ended with the text it had to have."""

    silence_s: float
    same: bool


def silence_after(killed_s: float, came_s: Sequence[float]) -> float:
    """Return the longest silence that begins within `BEGINS_WITHIN_S` of the kill; all in seconds of one clock."""
    silences = [
        ended - max(began, killed_s)
        for began, ended in itertools.pairwise(came_s)
        if ended > killed_s and began < killed_s + BEGINS_WITHIN_S
    ]
    return max(silences, default=0.0)


def serving_ranks(status: dict[str, Any], role: str) -> list[int]:
    """Return the process ids of the worker of `role` that holds a sequence, else of any."""
    workers = [entry for entry in status["workers"] if entry["registration"]["role"] == role]
    busy = [entry for entry in workers if entry["stats"] and entry["stats"]["sequences"]]
    return list((busy or workers)[0]["registration"]["process_ids"])


def victim(service: ServiceUnderTest, kind: str) -> Callable[[], None]:
    """Return what kills a process, or a node, that serves the stream that runs."""
    if kind == "router":
        (router,) = router_processes(service.root_pid)
        return lambda: os.kill(router, signal.SIGKILL)
    ranks = serving_ranks(service.status(), "draft" if kind == "drafter" else "target")
    if kind == "node":
        nodes = service.nodes
        assert nodes is not None
        name = nodes.node_of(ranks[0])
        assert name is not None
        return lambda: nodes.remove(name)
    process_id = ranks[1] if kind == "rank" else ranks[0]
    return lambda: os.kill(process_id, signal.SIGKILL)


async def killed_under(service: ServiceUnderTest, body: dict[str, Any], kind: str) -> tuple[Answer, float]:
    """Stream `body` and kill midway; return the answer and when it was killed."""
    killing: asyncio.Task[float] | None = None

    def kill() -> float:
        strike = victim(service, kind)
        killed_s = time.monotonic()
        strike()
        return killed_s

    async with asyncio.timeout(300.0), connected(service.url, body) as (answer, reader):
        await read_head(answer, reader)
        async for _ in chunks(answer, reader):
            if len(answer.chunks) == EVENTS_BEFORE:
                killing = asyncio.create_task(asyncio.to_thread(kill))
    if killing is None:
        raise BrokenAnswerError("the stream was over before anything was killed")
    return answer, await killing


def recover(service: ServiceUnderTest, kind: str, count: int) -> list[Recovery]:
    """Kill `count` times, each time when all is well again."""
    recoveries = []
    for number, prompt in enumerate(held_out_prompts(count)):
        sampling = SEEDED | {"seed": number, "ignore_eos": True, "stream": True}
        body = completion_body(prompt, sampling, True, MAX_TOKENS)
        undisturbed = service.complete(body | {"stream": False})["choices"][0]["token_ids"]
        answer, killed_s = asyncio.run(killed_under(service, body, kind))
        recoveries.append(Recovery(silence_after(killed_s, answer.chunk_s), answer.token_ids == undisturbed))
        print(
            f"{kind}: {recoveries[-1].silence_s:.3f} s, {'same' if recoveries[-1].same else 'OTHER'} text", flush=True
        )
        if service.nodes is not None:
            service.nodes.bring_back_all()
        wait_until_whole(service)
        time.sleep(SETTLE_S)
    return recoveries


def rows_of(kind: str, recoveries: Sequence[Recovery]) -> list[Row]:
    """Word the recoveries of one kind."""
    silences, aim = [each.silence_s for each in recoveries], AIMS_S.get(kind)
    median, worst = statistics.median(silences), max(silences)
    same = sum(each.same for each in recoveries)
    return [
        Row(f"{kind} killed: silence, median", median, "s", aim, None if aim is None else median / aim),
        Row(f"{kind} killed: silence, worst", worst, "s", aim, None if aim is None else worst / aim),
        Row(f"{kind} killed: same text", same, "streams", len(silences), same / len(silences)),
    ]


def groups(kinds: Sequence[str]) -> Iterator[tuple[int, bool, list[str]]]:
    """Yield ranks, whether on several nodes, and the kinds that one service can be asked for."""
    for key, group in itertools.groupby(kinds, lambda kind: (RANKS.get(kind, 1), kind == "node")):
        yield *key, list(group)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--count", type=int)
    parser.add_argument("--kinds", default=None)
    options = parser.parse_args()
    kinds = options.kinds.split(",") if options.kinds else list(KINDS[:-1] if options.quick else KINDS)
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    count = options.count or (FEW if options.quick else COUNT)
    rows: list[Row] = []
    for ranks, on_nodes, group in groups(kinds):
        with service_under_test(ranks, on_nodes) as service:
            for kind in group:
                rows += rows_of(kind, recover(service, kind, count))
    report("recovery", rows)
    if any(row.case.endswith("same text") and row.value != row.bound for row in rows):
        raise SystemExit("a text was not the undisturbed one")


if __name__ == "__main__":
    main()
