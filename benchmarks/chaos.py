"""Ten minutes in which something dies, hangs or gets lost every ten seconds, under load: nothing lost, nothing changed.

`make bench BENCH=chaos` (`QUICK=1`: a minute and a half). A real service with two targets of two ranks and two
drafters, in float32, gets streams, several choices, grammars, log-probabilities, penalties, whole answers and clients
that leave; faults come from a seeded plan. `ARGS="--seconds 600 --every 10 --seed 1 --ranks 2"`; `--nodes`
serves on several Ray nodes, of which one is removed now and then.

Afterwards every text that was finished is compared with what the same request got before anything was disturbed, and no
sequence and no KV block may be left anywhere. Exits with 1 if a text differs, something is left, or a request failed
for another reason than that no target was there in time.
"""

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos_faults import FaultInjection, LosableNodes, link_faults_file, worker_processes
from benchmarks.chaos_load import (
    DrillRequest,
    Outcome,
    ask_all,
    difference,
    drill_requests,
    keep_asking,
    longest_pauses,
)
from benchmarks.chaos_nodes import node_service
from benchmarks.chaos_plan import Fault, FaultKind, fault_plan, kinds_of
from benchmarks.harness import Row, report, running_service, tiny_pair_config
from benchmarks.idle import Leftovers, wait_until_idle
from models.corpus import held_out_prompts

WORKERS = 2
REQUESTS, FEW_REQUESTS = 64, 24
AT_ONCE = 6
MAX_TOKENS = 240
RECOVERY_TIMEOUT_S = 120.0
POLL_S = 0.2
SECTIONS: dict[str, Any] = {
    # Questions to workers that get no answer are given up earlier than by default, as they are lost on purpose here.
    "router": {"propose_deadline_s": 2.0, "verify_deadline_s": 15.0},
    "drafters": {"replicas": WORKERS},
    "ingress": {},
}


@dataclass(frozen=True, slots=True)
class ServiceUnderTest:
    """A service, the process that all of its processes descend from, and its nodes if some may be lost."""

    url: str
    root_pid: int
    nodes: LosableNodes | None = None

    def status(self) -> dict[str, Any]:
        """Return GET /status."""
        return dict(httpx.get(f"{self.url}/status", timeout=30.0).raise_for_status().json())

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer of one completion request; raises httpx.HTTPStatusError on an error status."""
        return dict(httpx.post(f"{self.url}/v1/completions", json=body, timeout=300.0).raise_for_status().json())


@dataclass(frozen=True, slots=True)
class Drill:
    """What happened: each request's index and outcome, the faults, and how long the service took to be whole again."""

    undisturbed: list[Outcome]
    outcomes: list[tuple[int, Outcome]]
    again: list[Outcome]
    happened: list[tuple[float, str, float]]
    missed: list[Fault]
    left: Leftovers
    whole_after_s: float


@contextlib.contextmanager
def service_under_test(ranks: int, on_nodes: bool) -> Iterator[ServiceUnderTest]:
    """Serve, on this machine or on several nodes that it pretends to be."""
    target = {"replicas": WORKERS, "tensor_parallel_size": ranks}
    if on_nodes:
        with node_service(SECTIONS | {"target": target}, ranks, WORKERS) as (url, nodes):
            yield ServiceUnderTest(url, os.getpid(), nodes)
    else:
        with running_service(tiny_pair_config(**SECTIONS, target=target)) as service:
            yield ServiceUnderTest(service.url, service.process.pid)


def wait_until_whole(service: ServiceUnderTest, replicas: int = WORKERS) -> float:
    """Return after how many seconds all workers are there; RuntimeError if they do not come back."""
    began = time.monotonic()
    while time.monotonic() < began + RECOVERY_TIMEOUT_S:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            if all(len(worker_processes(service.url, role)) == replicas for role in ("target", "draft")):
                return time.monotonic() - began
        time.sleep(POLL_S)
    raise RuntimeError(f"the workers did not all come back within {RECOVERY_TIMEOUT_S:g} s")


async def disturb(
    service: ServiceUnderTest,
    requests: Sequence[DrillRequest],
    plan: Sequence[Fault],
    seconds: float,
    injection: FaultInjection,
) -> list[tuple[int, Outcome]]:
    """Keep the service busy for so many seconds, with everything that is planned befalling it."""
    over, began = asyncio.Event(), time.monotonic()
    chance = random.Random(injection.seed)
    asking = asyncio.create_task(keep_asking(service.url, requests, AT_ONCE, chance, over))
    for fault in plan:
        await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
        print(f"{time.monotonic() - began:6.1f} s  {fault.kind}", flush=True)
        await asyncio.to_thread(injection.befall, fault)
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    over.set()
    return await asking


def drill(
    service: ServiceUnderTest,
    requests: Sequence[DrillRequest],
    plan: Sequence[Fault],
    seconds: float,
    faults: Path,
    seed: int,
) -> Drill:
    """Ask everything undisturbed, then disturbed, then once more."""
    injection = FaultInjection(service.url, service.root_pid, faults, seed, service.nodes)
    undisturbed = asyncio.run(ask_all(service.url, requests, AT_ONCE))
    outcomes = asyncio.run(disturb(service, requests, plan, seconds, injection))
    injection.finish()
    whole_after_s = wait_until_whole(service)
    again = asyncio.run(ask_all(service.url, requests[:FEW_REQUESTS], AT_ONCE))
    left = wait_until_idle(service)
    return Drill(undisturbed, outcomes, again, injection.happened, injection.missed, left, whole_after_s)


def is_of_capacity(error: str) -> bool:
    """Whether a request failed as it has to when targets are gone for longer than it may wait."""
    return "service_unavailable" in error and "no target is available" in error


def judge(done: Drill) -> tuple[list[Row], list[str]]:
    """Return the rows of a drill, and what was wrong."""
    ended = [*done.outcomes, *enumerate(done.again)]
    errors = [outcome.error for outcome in done.undisturbed if outcome.error]
    errors += [outcome.error for _, outcome in ended if outcome.error]
    failed = [f"failed: {error}" for error in errors if not is_of_capacity(error)]
    differing = [
        f"request {index}: {told}"
        for index, outcome in ended
        if outcome.error is None and (told := difference(outcome, done.undisturbed[index]))
    ]
    finished = sum(outcome.error is None and not outcome.left for _, outcome in ended)
    left = sum(outcome.left and outcome.error is None for _, outcome in ended)
    rows = [
        Row("requests sent", len(ended), "requests"),
        Row("finished", finished, "requests"),
        Row("left by their clients", left, "requests"),
        Row("failed, with 503, as no target was there in time", len(errors) - len(failed), "requests"),
        Row("failed otherwise", len(failed), "requests", bound=0),
        Row("differ from undisturbed", len(differing), "requests", bound=0),
        *done.left.rows(),
        Row("faults that found nothing to befall", len(done.missed), "faults"),
        Row("until all workers were there after the last", done.whole_after_s, "s"),
        Row("longest pause, undisturbed", longest_pauses(done.undisturbed, []).get("", 0.0), "s"),
    ]
    counts = Counter(kind for _, kind, _ in done.happened)
    pauses = longest_pauses((outcome for _, outcome in done.outcomes), done.happened)
    for kind, count in sorted(counts.items()):
        rows.append(Row(f"longest pause, {kind} ({count} times)", pauses.get(kind, 0.0), "s"))
    wrong = [*failed, *differing]
    if done.left.any:
        wrong.append(f"left afterwards: {done.left}")
    return rows, wrong


def main() -> None:
    """Run the drill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--kinds", help="only these, with commas between; default: all that can befall the service")
    options = parser.parse_args()
    seconds = options.seconds or (90.0 if options.quick else 600.0)
    prompts = held_out_prompts(FEW_REQUESTS if options.quick else REQUESTS)
    requests = drill_requests(options.seed, prompts, MAX_TOKENS)
    kinds = kinds_of(options.ranks, options.nodes)
    if options.kinds:
        kinds = tuple(FaultKind(name.strip()) for name in options.kinds.split(","))
    plan = fault_plan(options.seed, seconds, options.every, kinds)
    with (
        tempfile.TemporaryDirectory() as folder,
        link_faults_file(Path(folder)) as faults,
        service_under_test(options.ranks, options.nodes) as service,
    ):
        rows, wrong = judge(drill(service, requests, plan, seconds, faults, options.seed))
    report("chaos_nodes" if options.nodes else "chaos", rows)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
