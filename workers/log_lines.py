"""Where the log lines of a worker's process go, and how many of a kind there are."""

import logging
import time
from collections.abc import Callable

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def show_worker_log() -> None:
    """Let what workers log from level INFO on reach standard error, which Ray keeps in a file per process.

    Handlers that are there already stay as they are. Doing it twice is harmless.
    """
    logging.basicConfig(format=_FORMAT)
    logging.getLogger("workers").setLevel(logging.INFO)


class FewOfAKind(logging.Filter):
    """Lets through `most` records with the same message in each `period_s` seconds.

    What happens again and again in every round, or whenever a stranger likes, would bury everything else. The next one
    that is let through tells how many were not.
    """

    MOST_KINDS = 1_024

    def __init__(self, most: int = 5, period_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._period_s, self._clock = most, period_s, clock
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter.filter`."""
        now_s, kind = self._clock(), record.getMessage()
        began_s, count = self._seen.get(kind, (now_s, 0))
        left_out = 0
        if now_s - began_s >= self._period_s:
            left_out, began_s, count = max(0, count - self._most), now_s, 0
        if len(self._seen) >= self.MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = began_s, count + 1
        if left_out:
            record.msg = f"{record.msg} ({left_out} more like it were left out)"
        return count < self._most
