"""A circuit breaker per drafter: one that costs more than it gains is left out for a while, and then tried again."""

import math
from enum import Enum

from workers.router.acceptance import judged
from workers.router.goodput import RoundTimes

LEAST_VERIFICATIONS = 24
LEAST_BREAKEVEN = 0.125
"""A drafter that is nearly never right is left out, however little it costs."""
MEMORY_TOKENS = 192.0
"""Evidence fades over about so many drafts that were judged."""
SURE = 2.0
"""How many standard errors above the estimate the acceptance may be before it counts as too low for sure."""
PROBES = 8
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0


class BreakerState(Enum):
    """Closed: in use. Open: left out. Half-open: a few probes decide."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


def breakeven_rate(times: RoundTimes, sequences: int, hidden_ms: float = 0.0) -> float:
    """Return the acceptance rate, in [0, 1], from which on drafting for `sequences` sequences beats plain decoding.

    One draft each adds a draft step and as many tokens to verify, and a tokens per sequence; it pays where
    (1 + a) / T(1) > 1 / T(0). More drafts never pay at a lower rate: each adds as much time and fewer tokens.
    """
    read = sequences + times.extra_tokens
    plain_ms = times.verify.time_ms(read) + times.overhead_ms
    if plain_ms <= 0:
        return 1.0
    draft_ms = max(0.0, times.draft.time_ms(sequences) - hidden_ms)
    return min(1.0, (times.verify.token_ms * sequences + draft_ms) / plain_ms)


class CircuitBreaker:
    """Decides whether one drafter is used. Times are seconds of one monotonic clock.

    It opens when the acceptance rate of recent verifications is under break-even for sure (the upper end of Wilson's
    interval). After a pause, `probes` of its rounds are let through: if these break even it closes, else it opens for
    twice as long. Where all probes are used up and their outcome never comes, as many are granted again after the same
    pause.
    """

    def __init__(
        self, first_pause_s: float = FIRST_PAUSE_S, longest_pause_s: float = LONGEST_PAUSE_S, probes: int = PROBES
    ) -> None:
        """Raise ValueError unless 0 < `first_pause_s` <= `longest_pause_s` and `probes` is positive."""
        if not 0 < first_pause_s <= longest_pause_s:
            raise ValueError("first_pause_s must be positive and at most longest_pause_s")
        if probes < 1:
            raise ValueError(f"probes must be at least 1, not {probes}")
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._probes = probes
        self._state = BreakerState.CLOSED
        self._pause_s = 0.0
        self._next_s = 0.0
        self._closed_s: float | None = None
        self._granted = 0
        self._verifications = 0
        self._judged = self._accepted = 0.0

    @property
    def state(self) -> BreakerState:
        """The state as of the last call."""
        return self._state

    def allows(self, now_s: float) -> bool:
        """Tell whether the drafter may be asked for one more proposal; when half-open this uses up a probe."""
        if self._state is BreakerState.CLOSED:
            return True
        if now_s >= self._next_s:
            if self._state is BreakerState.OPEN:
                self._forget_evidence()
            self._state = BreakerState.HALF_OPEN
            self._granted = 0
            self._next_s = now_s + self._pause_s
        if self._state is BreakerState.OPEN or self._granted >= self._probes:
            return False
        self._granted += 1
        return True

    def observe(self, drafted: int, accepted: int, breakeven: float, now_s: float) -> None:
        """Note one verification of a chain of the drafter's, and the acceptance rate that would just pay."""
        trials = judged(drafted, accepted)
        # What an open breaker still hears was drafted before it opened.
        if trials == 0 or self._state is BreakerState.OPEN:
            return
        keep = (1 - 1 / MEMORY_TOKENS) ** trials
        self._verifications += 1
        self._judged = self._judged * keep + trials
        self._accepted = self._accepted * keep + accepted
        needed = max(breakeven, LEAST_BREAKEVEN)
        if self._state is BreakerState.HALF_OPEN:
            if self._verifications >= self._probes:
                self._decide(self._accepted / self._judged >= needed, now_s)
        elif self._verifications >= LEAST_VERIFICATIONS and self._most_likely() < needed:
            self._open(now_s)

    def _decide(self, pays: bool, now_s: float) -> None:
        if not pays:
            self._open(now_s)
            return
        self._state = BreakerState.CLOSED
        self._closed_s = now_s

    def _open(self, now_s: float) -> None:
        """Leave the drafter out: for longer if it was not in use for even as long as the last pause took."""
        settled = self._state is BreakerState.CLOSED and (
            self._closed_s is None or now_s - self._closed_s >= self._pause_s
        )
        self._pause_s = self._first_pause_s if settled else min(2 * self._pause_s, self._longest_pause_s)
        self._state = BreakerState.OPEN
        self._next_s = now_s + self._pause_s
        self._forget_evidence()

    def _forget_evidence(self) -> None:
        self._verifications = 0
        self._judged = self._accepted = 0.0

    def _most_likely(self) -> float:
        """The upper end of the interval of the acceptance rate (Wilson 1927)."""
        rate, share = self._accepted / self._judged, SURE**2 / self._judged
        spread = math.sqrt(share * (rate * (1 - rate) + share / 4))
        return float((rate + share / 2 + spread) / (1 + share))
