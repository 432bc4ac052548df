"""Which workers were heard of lately."""

import time
from collections.abc import Callable

SILENT_AFTER_S = 6.0


class Heartbeats:
    """When each worker was last known to be alive. Its supervisor says so about once a second, after a ping."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._last_s: dict[str, float] = {}

    def beat(self, worker_id: str) -> None:
        """Note that the worker is alive."""
        self._last_s[worker_id] = self._now_s()

    def forget(self, worker_id: str) -> None:
        """Note that the worker is out of service."""
        self._last_s.pop(worker_id, None)

    def is_silent(self, worker_id: str) -> bool:
        """Whether beats of the worker have ceased: it is dead, or stuck so that not even a ping is answered."""
        last_s = self._last_s.get(worker_id)
        return last_s is not None and self._now_s() - last_s > SILENT_AFTER_S
