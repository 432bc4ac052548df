"""The drafters in service, and what is known of each: how fast it is, how often it is right, whether it is benched."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.messages import DrafterReport, ProposeRequest, ProposeResponse
from workers.router.acceptance import AcceptanceBook, AcceptanceEstimate
from workers.router.breaker import BreakerState, CircuitBreaker
from workers.router.drafter_choice import DrafterChoice
from workers.router.peer import Peer
from workers.router.smoothed import Smoothed
from workers.router.step_times import StepTimeFit, StepTimes

LOOKUPS = "lookups of targets"
"""Their acceptance is observed under this name."""
MOST_READ_TOKENS = 16
"""A drafter that reads more than this for each sequence before it drafts says nothing about its draft steps."""


@dataclass(slots=True)
class DrafterRecord:
    """One drafter: `step_times` are those of one draft step by its rows, `read_ms_per_token` of reading only.

    It is expected to be through with what it was sent to read by `reads_until_s` of the monotonic clock.
    """

    peer: Peer
    step_times: StepTimes = field(default_factory=StepTimes)
    read_ms_per_token: Smoothed = field(default_factory=Smoothed)
    reads_until_s: float = 0.0
    reads_under_way: int = 0
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)


class Roster(Mapping[str, Peer]):
    """Drafters by worker id."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceBook()
        self.choice = DrafterChoice()
        self._records: dict[str, DrafterRecord] = {}

    def __getitem__(self, worker_id: str) -> Peer:
        return self._records[worker_id].peer

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, peer: Peer) -> None:
        """Take a drafter into service."""
        self._records[peer.worker_id] = DrafterRecord(peer)

    def remove(self, worker_id: str) -> bool:
        """Take a drafter out of service; False if it was not in it."""
        self.acceptance.forget(worker_id)
        return self._records.pop(worker_id, None) is not None

    def record(self, worker_id: str | None) -> DrafterRecord | None:
        """Return what is known of a drafter, None if it is not in service."""
        return self._records.get(worker_id) if worker_id is not None else None

    def is_usable(self, worker_id: str | None) -> bool:
        """Whether the drafter is in service, and not benched."""
        record = self.record(worker_id)
        return record is not None and record.breaker.state is BreakerState.CLOSED

    def may_probe(self, worker_id: str | None) -> bool:
        """Whether a benched drafter is to be tried once now, which is then taken to be done."""
        record = self.record(worker_id)
        return record is not None and record.breaker.allows(time.monotonic())

    def step_fit(self, worker_id: str | None) -> StepTimeFit | None:
        """Return the time of one draft step by its rows; None if it was never measured."""
        record = self.record(worker_id)
        return None if record is None else record.step_times.fit_or_flat()

    def lookup_estimate(self, traffic_class: str) -> AcceptanceEstimate:
        """Return what to expect of drafts that a target looks up for a new sequence."""
        return self.acceptance.sequence_estimate(LOOKUPS, traffic_class)

    def observe_lookup(self, traffic_class: str, drafted: int, accepted: int) -> None:
        """Note what became of drafts that a target looked up."""
        self.acceptance.observe(LOOKUPS, traffic_class, drafted, accepted)

    def sequence_estimate(self, worker_id: str, traffic_class: str) -> AcceptanceEstimate:
        """Return what to expect of the drafter's guesses at a new sequence."""
        return self.acceptance.sequence_estimate(worker_id, traffic_class)

    def reports(self) -> tuple[DrafterReport, ...]:
        """Return what has become of each drafter's proposals; those that were never verified are left out."""
        reports = []
        for known in self.acceptance.snapshot().drafters:
            record, fit = self.record(known.drafter_id), self.step_fit(known.drafter_id)
            if record is not None:
                reports.append(
                    DrafterReport(
                        known.drafter_id,
                        record.peer.registration.name,
                        not self.is_usable(known.drafter_id),
                        known.rate,
                        dict(known.rate_by_class),
                        known.accepted_length,
                        known.verifications,
                        known.drafted_per_position,
                        known.accepted_per_position,
                        None if fit is None else fit.time_ms(1),
                    )
                )
        return tuple(reports)

    def tokens_readable_in(self, worker_id: str, ms: float) -> int | None:
        """Return how many tokens the drafter reads in `ms` milliseconds; None where that is not known."""
        record = self.record(worker_id)
        if record is None or not record.read_ms_per_token.value:
            return None
        return int(ms / record.read_ms_per_token.value)

    def begins_to_read(self, worker_id: str, tokens: int) -> None:
        """Note that the drafter was sent so many tokens to read."""
        if record := self.record(worker_id):
            begins_s = max(record.reads_until_s, time.monotonic())
            record.reads_until_s = begins_s + tokens * record.read_ms_per_token.value / 1e3

    @contextmanager
    def reading(self, worker_id: str) -> Iterator[None]:
        """Note that the drafter reads within the block: others' drafts come later than they would by themselves."""
        record = self.record(worker_id)
        if record is None:
            yield
            return
        record.reads_under_way += 1
        try:
            yield
        finally:
            record.reads_under_way -= 1

    def is_reading(self, worker_id: str) -> bool:
        """Whether the drafter has been sent something only to read, and has not answered."""
        record = self.record(worker_id)
        return record is not None and record.reads_under_way > 0

    def reads_for_ms(self, worker_id: str) -> float:
        """Return how long the drafter is expected to be reading yet."""
        record = self.record(worker_id)
        return 0.0 if record is None else max(0.0, record.reads_until_s - time.monotonic()) * 1e3

    def observe_steps(self, worker_id: str, request: ProposeRequest, answer: ProposeResponse) -> None:
        """Note how long the drafter took for its draft steps, or to read, but not if it did much of both."""
        record = self.record(worker_id)
        if record is None:
            return
        drafted = [len(item.proposal) for item in answer.items]
        read = sum(len(item.committed) for item in request.items)
        if steps := max(drafted, default=0):
            if not reads_much(request):
                record.step_times.observe(len(request.items), answer.compute_ms / steps)
        elif not any(item.draft_tokens for item in request.items):
            record.read_ms_per_token.observe(answer.compute_ms / read)

    def observe_verification(
        self, worker_id: str, traffic_class: str, drafted: int, accepted: int, break_even: float | None
    ) -> bool:
        """Note what became of the drafter's proposal; True if that benches it; nothing does if `break_even` is None."""
        record = self.record(worker_id)
        if record is None:
            return False
        self.acceptance.observe(worker_id, traffic_class, drafted, accepted)
        self.choice.observe(traffic_class, record.peer.registration.name, drafted, accepted)
        if break_even is None:
            return False
        was_usable = self.is_usable(worker_id)
        record.breaker.observe(drafted, accepted, break_even, time.monotonic())
        return was_usable and not self.is_usable(worker_id)


def reads_much(request: ProposeRequest) -> bool:
    """Whether a drafter reads so much for the request that its time says nothing about draft steps."""
    return sum(len(item.committed) for item in request.items) > MOST_READ_TOKENS * len(request.items)
