"""Links that hang, and links that note for whom they are used."""

import asyncio
from contextvars import ContextVar

from tests.fakes.workers import ScriptedWorker
from workers.errors import LinkClosedError
from workers.messages import (
    ReleaseRequest,
    WorkerRequest,
    WorkerResponse,
)


class HangingLink:
    """A link whose first step `hangs`, and fails when the test says that it `breaks`."""

    def __init__(self) -> None:
        self.hangs = asyncio.Event()
        self.breaks = asyncio.Event()

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        if isinstance(message, ReleaseRequest):
            return None
        self.hangs.set()
        await self.breaks.wait()
        raise LinkClosedError("the worker is gone")


REQUEST_IN_SERVICE: ContextVar[str | None] = ContextVar("request_in_service", default=None)


class ContextNotingLink:
    """Hands messages on to `worker` and notes which request each message was sent for, as Ray does by context."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self.senders: list[str | None] = []

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        self.senders.append(REQUEST_IN_SERVICE.get())
        return await self._worker.call(message, deadline_s)
