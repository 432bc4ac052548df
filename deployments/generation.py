"""Runs the choices of one request: events of the router in, deltas of visible text out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import anyio

from deployments.text import TextCodec
from deployments.visible_text import EchoedPrompt, PromptEcho, TextDelta, VisibleText
from workers.errors import RequestError, UnavailableError
from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest, MetricsSnapshot, RouterStatus

# The router ends a request at its own deadline; this much later the ingress stops believing in an answer.
DEADLINE_GRACE_S = 5.0
# How long a cancelled generation may take to tell the router.
CLOSE_TIMEOUT_S = 5.0


class GenerationService(Protocol):
    """What answers generation requests: the router, or a scripted fake in tests."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield the events of one sequence; closing the iterator cancels it."""
        ...

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """Return a snapshot of the router; asking its workers for their stats as well may take a few seconds."""
        ...

    async def metrics(self) -> MetricsSnapshot:
        """Return all metrics of the router and its workers, which may take as long."""
        ...


class GenerationFailedError(RequestError):
    """The router gave up on a sequence; status and code are the router's."""

    def __init__(self, failure: GenerationFailed) -> None:
        super().__init__(failure.message)
        self.status = failure.status
        self.code = failure.code
        if failure.status < 500:
            self.error_type = "overloaded_error" if failure.status == 429 else "invalid_request_error"


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """A delta and the index of the choice it belongs to."""

    index: int
    delta: TextDelta


async def generate_text(
    service: GenerationService, request: GenerationRequest, codec: TextCodec, echoed: EchoedPrompt | None = None
) -> AsyncGenerator[TextDelta, None]:
    """Yield the deltas of one choice, the prompt first if it is echoed; the last one has a finish reason.

    Closing it cancels the generation.

    GenerationFailedError as the router says; UnavailableError if it falls silent or stops without a reason.
    """
    echo = PromptEcho(request, echoed) if echoed is not None else None
    text = VisibleText(request, codec, offset=len(echoed.text) if echoed is not None else 0)
    deadline = asyncio.get_running_loop().time() + request.timeout_s + DEADLINE_GRACE_S
    events = service.generate(request)
    try:
        while True:
            event = await _next_event(events, deadline)
            if isinstance(event, GenerationFailed):
                raise GenerationFailedError(event)
            if echo is not None and (prompt := echo.add(event)) is not None:
                yield prompt
            if len(event.token_ids) or event.finish_reason is not None:
                yield text.add(event)
            if event.finish_reason is not None:
                return
    finally:
        await _close(events)


async def generate_choices(
    service: GenerationService,
    codec: TextCodec,
    requests: Sequence[GenerationRequest],
    echoed: Sequence[EchoedPrompt] = (),
) -> AsyncGenerator[ChoiceDelta, None]:
    """Run all choices at once and yield their deltas as they come. The first failure cancels the others.

    `echoed` is empty, or has the prompt of each request.
    """
    # A full queue holds the choices back while the client is slow to read.
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(maxsize=len(requests))

    async def run(index: int, request: GenerationRequest) -> None:
        try:
            prompt = echoed[index] if echoed else None
            async with aclosing(generate_text(service, request, codec, prompt)) as deltas:
                async for delta in deltas:
                    await queue.put(ChoiceDelta(index, delta))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(run(index, request)) for index, request in enumerate(requests)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: "Iterable[asyncio.Task[object] | asyncio.Task[None]]") -> None:
    """Cancel what still runs and let it clean up, even if the caller is itself being cancelled."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await asyncio.wait(pending)


async def _next_event(events: AsyncIterator[GenerationEvent], deadline: float) -> GenerationEvent:
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(events)
    except TimeoutError:
        raise UnavailableError("The generation did not finish in time.") from None
    except StopAsyncIteration:
        raise UnavailableError("The generation ended before it was finished.") from None


async def _close(events: AsyncIterator[GenerationEvent]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        # Shielded: in a cancelled scope each await is cancelled again, and the router would never be told.
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await close()
