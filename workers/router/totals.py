"""What happened over the router's life: sums for its status, and metrics."""

import time
from dataclasses import dataclass, field

from workers.messages import RoundTotals
from workers.router.metrics_recorder import MetricsRecorder


@dataclass(slots=True)
class RoundClock:
    """Times of one round in milliseconds; the wait includes the compute.

    `drafters_read`: a drafter had much to read before it could draft for the round. `drafted_ahead`: some of its drafts
    were, or would have been if what was expected had come.
    """

    # Looked up when it is read: a test may own the clock.
    began_s: float = field(default_factory=lambda: time.perf_counter())
    draft_wait_ms: float = 0.0
    draft_compute_ms: float = 0.0
    verify_wait_ms: float = 0.0
    verify_compute_ms: float = 0.0
    drafters_read: bool = False
    drafted_ahead: bool = False

    def verified(self, wait_ms: float, compute_ms: float) -> None:
        """Note how long the verification took."""
        self.verify_wait_ms, self.verify_compute_ms = wait_ms, compute_ms

    def wall_ms(self) -> float:
        """Return the time since the round began."""
        return (time.perf_counter() - self.began_s) * 1e3


class TotalsCounter:
    """Accumulates `RoundTotals`; `metrics` records in more detail, by worker."""

    def __init__(self, metrics: MetricsRecorder) -> None:
        self.metrics = metrics
        self._sums: dict[str, float] = {}

    @property
    def totals(self) -> RoundTotals:
        """The sums so far."""
        return RoundTotals(**self._sums)  # type: ignore[arg-type]

    def add_round(self, clock: RoundClock) -> None:
        """Count a finished round."""
        self.add(
            rounds=1,
            wall_ms=clock.wall_ms(),
            draft_wait_ms=clock.draft_wait_ms,
            draft_compute_ms=clock.draft_compute_ms,
            verify_wait_ms=clock.verify_wait_ms,
            verify_compute_ms=clock.verify_compute_ms,
        )

    def add_commit(self, drafted: int, accepted: int, committed: int) -> None:
        """Count one sequence's verification."""
        self.add(verifications=1, draft_tokens=drafted, accepted_tokens=accepted, committed_tokens=committed)

    def add(self, **counts: float) -> None:
        """Add to the sums of these names, which are those of `RoundTotals`."""
        sums = self._sums
        for name, count in counts.items():
            if count:
                sums[name] = sums.get(name, 0) + count
