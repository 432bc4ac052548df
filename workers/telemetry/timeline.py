"""Where the time of one request goes: in the line, until its first token, until its last. Kept for every request."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

CLOSE_S = 20e-6
"""Two readings of a clock so close together are of one moment; what a trace tells apart is further apart."""
MOST_READINGS = 5


class Phase(StrEnum):
    """What a sequence is doing. Moved to another worker, it queues and reads again."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Timeline:
    """Seconds spent in each phase. At any time one of them runs, so they add up to the time since the beginning.

    Times given and kept are those of `time.perf_counter`. The step that commits the first tokens belongs to PREFILL,
    whatever number of tokens it commits: DECODE is the time between the first commit and the last.
    """

    # Clocks are looked up when they are read: a test may own them.
    began_s: float = field(default_factory=lambda: time.perf_counter())
    began_ns: int = field(init=False)
    phase: Phase = Phase.QUEUE
    first_token_s: float | None = None
    _spent_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        self._since_s = self.began_s
        self.began_ns = _epoch_ns(self.began_s)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Begin a phase; the one so far ends."""
        self._spent_s[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    def committed(self, now_s: float) -> bool:
        """Tokens were committed; return whether they are the first ones of the request."""
        if self.phase is not Phase.DECODE:
            self.enter(Phase.DECODE, now_s)
        is_first = self.first_token_s is None
        if is_first:
            self.first_token_s = now_s
        return is_first

    def end(self, now_s: float) -> None:
        """The request is over."""
        self.enter(self.phase, now_s)

    def spent_ms(self, phase: Phase) -> float:
        """Return the milliseconds spent in a phase, up to the last change of phase."""
        return self._spent_s[phase] * 1e3

    @property
    def total_ms(self) -> float:
        """Milliseconds from the beginning to the last change of phase."""
        return (self._since_s - self.began_s) * 1e3

    @property
    def first_token_ms(self) -> float | None:
        """Milliseconds from the beginning to the first commit; None if there was none."""
        return None if self.first_token_s is None else (self.first_token_s - self.began_s) * 1e3

    def epoch_ns(self, at_s: float) -> int:
        """Return a time of `time.perf_counter` as nanoseconds since 1970, in the same order as the others."""
        return self.began_ns + round((at_s - self.began_s) * 1e9)


def _epoch_ns(at_s: float) -> int:
    """Return a time of `time.perf_counter` as nanoseconds since 1970.

    The process may be stopped between reading the one clock and the other, so a reading in between counts that took
    little time; else its spans would seem to begin later than what they led to elsewhere.
    """
    best_s, best_ns = float("inf"), 0
    for _ in range(MOST_READINGS):
        before_s, now_ns = time.perf_counter(), time.time_ns()
        took_s = time.perf_counter() - before_s
        if took_s < best_s:
            best_s, best_ns = took_s, now_ns - round((before_s - at_s) * 1e9)
        if took_s < CLOSE_S:
            break
    return best_ns
