"""Links that hang, links that hold an answer back, and links that note for whom they are used."""

import asyncio
from contextvars import ContextVar

from tests.fakes.workers import ScriptedWorker
from workers.errors import LinkClosedError
from workers.messages import (
    ProposeRequest,
    ReleaseRequest,
    VerifyRequest,
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


class HoldingLink:
    """A link that holds back the answer of step `held_step` until `release`; `holding` says that it does."""

    def __init__(self, worker: ScriptedWorker, held_step: int) -> None:
        self.holding = asyncio.Event()
        self.release = asyncio.Event()
        self._worker = worker
        self._held_step = held_step

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        held = isinstance(message, VerifyRequest) and self._worker.steps == self._held_step
        answer = await self._worker.call(message, deadline_s)
        if held:
            self.holding.set()
            await self.release.wait()
        return answer


class SlowReadingLink:
    """A link to a drafter that answers one message at a time, as real ones do, and reads for `reading_s` seconds."""

    def __init__(self, worker: ScriptedWorker, reading_s: float) -> None:
        self._worker = worker
        self._reading_s = reading_s
        self._turn = asyncio.Lock()

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        async with self._turn:
            if isinstance(message, ProposeRequest) and not any(item.draft_tokens for item in message.items):
                await asyncio.sleep(self._reading_s)
            return await self._worker.call(message, deadline_s)


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
