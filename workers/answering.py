"""Which method of a worker answers which message: the same for actors, threads and tests."""

from collections.abc import Iterable
from typing import Protocol

from workers.drafters.base import Drafter
from workers.messages import (
    DraftAheadRequest,
    ProposeRequest,
    ReleaseRequest,
    StatsRequest,
    VerifyRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
    WorkerStats,
)


class Target(Protocol):
    """What verifies: `workers.engine.verifier.Verifier` and its like."""

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Run one step; answers come in the order of the items."""
        ...

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their KV blocks; unknown ids are ignored."""
        ...

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        ...


def answer(worker: Target | Drafter, message: WorkerRequest) -> WorkerResponse | None:
    """Answer one message of the link protocol. Raises TypeError for one that the worker does not answer."""
    match message:
        case VerifyRequest() if hasattr(worker, "verify"):
            return worker.verify(message)
        case ProposeRequest() if hasattr(worker, "propose"):
            return worker.propose(message)
        case DraftAheadRequest() if hasattr(worker, "draft_ahead"):
            return worker.draft_ahead(message)
        case ReleaseRequest(sequence_ids):
            worker.release(sequence_ids)
            return None
        case StatsRequest():
            return worker.stats()
        case _:
            raise TypeError(f"{type(worker).__name__} does not answer {type(message).__name__}")
