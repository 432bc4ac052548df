"""Server-sent events of an answer, and work that ends when its client goes away."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.generation import CLOSE_TIMEOUT_S, ChoiceDelta, cancel_and_wait
from deployments.http_errors import error_body, error_of_unexpected
from deployments.openai_responses import AnswerFormat, Json, Usage, UsageTally
from workers.errors import RequestError

logger = logging.getLogger(__name__)
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise ClientDisconnect when the client goes away first.

    The request's body must have been read. Being cancelled itself, as Ray Serve's proxy does, it cancels `work` too.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()
        raise ClientDisconnect
    finally:
        await cancel_and_wait([task, watcher])


class EventStream(Response):
    """A response of server-sent events, whose generators are closed however the response ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[ChoiceDelta, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Unlike Starlette's own, notices a client that leaves while there is nothing to send."""
        try:
            await run_while_connected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            logger.debug("client left a stream")
        finally:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await self._events.aclose()
                # Closing a generator that never started does not reach the one it would have read from.
                await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_events(
    form: AnswerFormat,
    first: ChoiceDelta,
    rest: AsyncGenerator[ChoiceDelta, None],
    tally: UsageTally,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, one per block of tokens that shows something.

    A failure becomes one event with OpenAI's error object, and the stream ends without [DONE].
    """
    # With usage asked for, every chunk has the key, and it is null but in the last.
    usage: dict[str, Usage | None] = {"usage": None} if include_usage else {}
    item: ChoiceDelta | None = first
    try:
        for choice in form.opening():
            yield _event(form.head.part(form.chunk_kind, [choice], **usage))
        while item is not None:
            tally.add(item)
            for choice in form.chunks(item):
                yield _event(form.head.part(form.chunk_kind, [choice], **usage))
            item = await anext(rest, None)
        if include_usage:
            yield _event(form.head.part(form.chunk_kind, [], usage=tally.total()))
        yield DONE
    except RequestError as error:
        yield _event(error_body(error))
    except Exception:
        logger.exception("a stream failed unexpectedly")
        yield _event(error_body(error_of_unexpected()))


def _event(data: Json) -> bytes:
    # Escaped to ASCII: many clients split lines at U+2028 and U+0085 too, which JSON leaves bare.
    return f"data: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
