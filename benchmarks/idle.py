"""What a service still holds when nobody asks it anything."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from benchmarks.harness import Row

IDLE_TIMEOUT_S = 30.0
POLL_S = 0.2


class TellsStatus(Protocol):
    """A service that can be asked for its status."""

    def status(self) -> dict[str, Any]:
        """Return GET /status."""
        ...


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Sequences in the router's hands and in its queue, sequences that workers hold, and KV blocks in use."""

    running: int
    waiting: int
    at_workers: int
    kv_blocks: int

    @property
    def any(self) -> bool:
        """Whether anything is left."""
        return bool(self.running or self.waiting or self.at_workers or self.kv_blocks)

    def rows(self) -> list[Row]:
        """Word what is left; nothing should be."""
        counts = {
            "running sequences": self.running,
            "waiting sequences": self.waiting,
            "sequences at workers": self.at_workers,
            "KV blocks": self.kv_blocks,
        }
        return [Row(f"left afterwards: {what}", count, "", bound=0) for what, count in counts.items()]


def leftovers(service: TellsStatus) -> Leftovers:
    """Ask the service. A worker that does not answer counts as holding all of its blocks."""
    status = service.status()
    stats = [(worker["registration"], worker["stats"]) for worker in status["workers"]]
    return Leftovers(
        status["running"],
        status["waiting"],
        sum(told["sequences"] for _, told in stats if told),
        sum(told["total_blocks"] - told["free_blocks"] if told else who["total_blocks"] for who, told in stats),
    )


def wait_until_idle(service: TellsStatus, timeout_s: float = IDLE_TIMEOUT_S) -> Leftovers:
    """Return what is left as soon as nothing is, or after `timeout_s`; httpx.HTTPError if it does not answer then."""
    deadline = time.monotonic() + timeout_s
    while True:
        last = time.monotonic() >= deadline
        try:
            left = leftovers(service)
        except httpx.HTTPError:
            if last:
                raise
        else:
            if last or not left.any:
                return left
        time.sleep(POLL_S)
