"""What a round costs beyond the work in it: Ray actor calls against ZeroMQ, between the same three actors.

`make bench BENCH=link`, `QUICK=1` for a tenth of the rounds. A round is one propose and then one verify. The links take
turns, round by round. With work, the workers sleep as long as models would compute, and all processes wake from idle.
"""

import argparse
import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import ray

from benchmarks.harness import Row, report
from deployments.local_cluster import local_ray
from workers.links import Link, LinkKind
from workers.links.opening import WorkerLinks
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    LinkAddress,
    Proposal,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
    token_ids,
)

KINDS: tuple[LinkKind, ...] = ("ray", "zmq")
SEQUENCES = (1, 8)
DRAFTS = 4
COMMITTED = token_ids([1203, 88, 4075])
DRAFTED = token_ids([11, 2022, 303, 4])
# Milliseconds of a draft of four tokens and of a verification, as in the figures of the design.
NO_WORK, WORK = (0.0, 0.0), (16.0, 30.0)
AIM_MS = 1.6
DEADLINE_S = 30.0
UNCOUNTED_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one round: in all, what the workers did, and what the router computed for its two calls."""

    wall: float
    work: float
    sending: float
    reading: float

    @property
    def overhead(self) -> float:
        """What the round took beyond the work."""
        return self.wall - self.work

    @property
    def waiting(self) -> float:
        """What of the overhead the router spent waiting: the way there and back, and the worker's end of the link."""
        return self.overhead - self.sending - self.reading


class TimedCall:
    """Awaits a call; notes how long it computes before it first waits (sending), and after it last did (reading)."""

    def __init__(self, call: "Coroutine[Any, Any, WorkerResponse | None]") -> None:
        self._call = call
        self.sending_ms = self.reading_ms = 0.0

    def __await__(self) -> "Generator[Any, None, WorkerResponse | None]":
        steps = self._call.__await__()
        began = resumed = time.perf_counter()
        try:
            awaited = next(steps)
            self.sending_ms = _ms_since(began)
            while True:
                yield awaited
                resumed = time.perf_counter()
                awaited = next(steps)
        except StopIteration as end:
            self.reading_ms = _ms_since(resumed)
            answer: WorkerResponse | None = end.value
            return answer


class SleepingWorker:
    """Answers at once, or after its work, with what a cohort's answer looks like."""

    def __init__(self) -> None:
        self._server: ZmqServer | None = None
        self._work_ms = 0.0

    def set_work(self, milliseconds: float) -> None:
        """Take so long from now on."""
        self._work_ms = milliseconds

    def handle(self, message: WorkerRequest) -> WorkerResponse | None:
        """Sleep, and answer."""
        began = time.perf_counter()
        if self._work_ms:
            time.sleep(self._work_ms / 1000)
        match message:
            case ProposeRequest(items):
                proposed = tuple(ProposedItem(item.sequence_id, item.epoch, Proposal(DRAFTED)) for item in items)
                return ProposeResponse(proposed, _ms_since(began))
            case VerifyRequest(verifications):
                verified = tuple(VerifiedItem(item.sequence_id, item.epoch, 2, COMMITTED) for item in verifications)
                return VerifyResponse(verified, _ms_since(began), 7 * len(verified))
            case _:
                return None

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def open_link(self, router_public_key: bytes) -> LinkAddress:
        """As real workers do."""
        if self._server is None:
            self._server = ZmqServer(ray.util.get_node_ip_address(), self.handle)
        return self._server.admit(router_public_key)


class RoundLoop:
    """The router's part: rounds over both kinds of link in turn."""

    async def connect(self, drafter: Any, target: Any) -> None:
        """Open all links."""
        self._links: dict[LinkKind, tuple[Link, Link]] = {}
        for kind in KINDS:
            links = WorkerLinks(kind)
            self._links[kind] = (await links.link_to("drafter", drafter), await links.link_to("target", target))

    async def run(self, sequences: int, rounds: int) -> dict[LinkKind, list[Timing]]:
        """Return the timings of `rounds` rounds over each kind of link."""
        timings: dict[LinkKind, list[Timing]] = {kind: [] for kind in KINDS}
        for epoch in range(UNCOUNTED_ROUNDS + rounds):
            for kind in KINDS:
                timings[kind].append(await self._round(self._links[kind], sequences, epoch))
        return {kind: counted[UNCOUNTED_ROUNDS:] for kind, counted in timings.items()}

    async def _round(self, links: tuple[Link, Link], sequences: int, epoch: int) -> Timing:
        drafter, target = links
        began = time.perf_counter()
        proposing = TimedCall(_coroutine(drafter, proposals(sequences, epoch)))
        proposed = await proposing
        assert isinstance(proposed, ProposeResponse)
        verifying = TimedCall(_coroutine(target, verifications(proposed, epoch)))
        verified = await verifying
        assert isinstance(verified, VerifyResponse)
        return Timing(
            wall=_ms_since(began),
            work=proposed.compute_ms + verified.compute_ms,
            sending=proposing.sending_ms + verifying.sending_ms,
            reading=proposing.reading_ms + verifying.reading_ms,
        )


def proposals(sequences: int, epoch: int) -> ProposeRequest:
    """What a cohort in the middle of its texts asks of the drafter."""
    items = (ProposeItem(2**60 + number, epoch, 250 + 3 * epoch, COMMITTED, DRAFTS) for number in range(sequences))
    return ProposeRequest(tuple(items))


def verifications(proposed: ProposeResponse, epoch: int) -> VerifyRequest:
    """What the router makes of the drafter's answer."""
    return VerifyRequest(
        tuple(VerifyItem(item.sequence_id, epoch, 250 + 3 * epoch, COMMITTED, item.proposal) for item in proposed.items)
    )


def _coroutine(link: Link, message: WorkerRequest) -> "Coroutine[Any, Any, WorkerResponse | None]":
    return link.call(message, DEADLINE_S)


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def rows_of(case: str, timings: dict[LinkKind, list[Timing]]) -> list[Row]:
    """Overhead of each link, and what ZeroMQ's consists of."""
    rows = []
    for kind in KINDS:
        overheads = [timing.overhead for timing in timings[kind]]
        middle, aim = median(overheads), AIM_MS if kind == "zmq" else None
        rows.append(Row(f"{case}, {kind}: overhead, median", middle, "ms", aim, aim and middle / aim))
        rows.append(Row(f"{case}, {kind}: overhead, 95 %", quantiles(overheads, n=20)[-1], "ms"))
    for part in ("sending", "waiting", "reading"):
        rows.append(Row(f"{case}, zmq: {part}, median", median(getattr(t, part) for t in timings["zmq"]), "ms"))
    return rows


def measure(rounds: int) -> list[Row]:
    """Start the actors and run every case."""
    worker: Any = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(SleepingWorker)
    router: Any = ray.remote(num_cpus=0)(RoundLoop)
    drafter, target, loop = worker.remote(), worker.remote(), router.remote()
    ray.get(loop.connect.remote(drafter, target))
    rows = []
    for name, (draft_ms, verify_ms) in (("no work", NO_WORK), ("16 + 30 ms of work", WORK)):
        ray.get([drafter.set_work.remote(draft_ms), target.set_work.remote(verify_ms)])
        for sequences in SEQUENCES:
            rows += rows_of(f"{name}, {sequences} sequence(s)", ray.get(loop.run.remote(sequences, rounds)))
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    with local_ray(cpus=2):
        rows = measure(rounds=30 if parser.parse_args().quick else 300)
    report("link", rows)


if __name__ == "__main__":
    main()
