"""How long to wait before a worker is started anew, so that one that keeps dying does not keep a machine busy. Pure."""

from collections.abc import Callable

SETTLED_AFTER_S = 10.0
"""A worker that lived so long did not die of being started."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class RestartPacing:
    """Doubles the pause with each worker that dies young, or does not start at all; forgets them after one that lived.

    `now_s` is a monotonic clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._started_s: float | None = None
        self._died_young = 0

    def started(self) -> None:
        """Note that a worker has come up."""
        self._started_s = self._now_s()

    def pause_s(self) -> float:
        """Note that the worker has died, or did not start; return how long to wait before the next one is started."""
        lived_s = 0.0 if self._started_s is None else self._now_s() - self._started_s
        self._started_s = None
        self._died_young = 0 if lived_s >= SETTLED_AFTER_S else self._died_young + 1
        if not self._died_young:
            return 0.0
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._died_young - 1, 16))
