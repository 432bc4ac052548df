"""An ingress process that is told to stop, without Ray: what it refuses, what it finishes, and when it gives up."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve._private import replica

from deployments.draining import Drain
from deployments.http_app import create_app
from deployments.ingress import replica_is_stopping
from deployments.text import TextCodec
from tests.deployments.asgi import Exchange, until
from tests.deployments.helpers import CHAT, COMPLETIONS, LIMITS, SOME, events_of, says
from tests.fakes import ScriptedService, in_blocks
from tests.limits import HANG_S
from workers.messages import GenerationEvent, GenerationRequest

BODY = json.dumps({"prompt": "a", "stream": True}).encode()
TIMEOUT_S = 10.0


@dataclass
class Stop:
    """A stop that comes when it is told to, on a clock that is set by hand."""

    told: bool = False
    now_s: float = 0.0
    drain: Drain = field(init=False)

    def __post_init__(self) -> None:
        self.drain = Drain(lambda: self.told, TIMEOUT_S, lambda: self.now_s)


class SteppedService(ScriptedService):
    """Yields an event for each step that it is allowed."""

    def __init__(self, drain: Drain) -> None:
        super().__init__(lambda _: in_blocks([*SOME, *SOME], 1))
        self.drain = drain
        self.allowed = asyncio.Semaphore(0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield the script's events, as the router's client does."""
        async for event in self.drain.until_over(super().generate(request)):
            await self.allowed.acquire()
            yield event

    def allow(self, steps: int) -> None:
        """Let `steps` events pass."""
        for _ in range(steps):
            self.allowed.release()


class StreamBeingStopped:
    """A stream of which the first event was sent when its process is told to stop."""

    def __init__(self, codec: TextCodec) -> None:
        self.stop = Stop()
        self.service = SteppedService(self.stop.drain)
        self.app = create_app(self.service, codec, LIMITS, self.stop.drain)
        self.running = Exchange([BODY])

    async def begin(self) -> asyncio.Task[Any]:
        """Return when the process was told."""
        task = asyncio.create_task(self.running.run(self.app, COMPLETIONS))
        self.service.allow(1)
        await until(lambda: len(self.running.sent) > 1)
        self.stop.told = True
        return task

    def events(self) -> list[Any]:
        """What was sent so far."""
        return events_of(self.running.body.decode())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_new_requests_are_refused_and_running_streams_finish(codec: TextCodec, path: str) -> None:
    async def run() -> None:
        stream = StreamBeingStopped(codec)
        task = await stream.begin()
        refused = await Exchange([b"{}"]).run(stream.app, path)
        assert refused.error(503)["code"] == "draining" and refused.headers["retry-after"]
        stream.service.allow(5)
        await task
        assert stream.events()[-1] == "[DONE]"

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_stream_that_outlasts_its_grace_ends_with_an_error_and_no_reason(codec: TextCodec) -> None:
    async def run() -> None:
        stream = StreamBeingStopped(codec)
        task = await stream.begin()
        stream.service.allow(1)
        await until(lambda: len(stream.running.sent) > 2)
        stream.stop.now_s = TIMEOUT_S
        stream.service.allow(2)
        await task
        *chunks, last = stream.events()
        assert last["error"]["code"] == "draining"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
        await until(lambda: stream.service.cancelled == [stream.service.requests[0].request_id])

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_drain_begins_once_and_leaves_time_to_say_so() -> None:
    stop = Stop()
    assert not stop.drain.has_begun() and not stop.drain.is_over()
    stop.told = True
    assert stop.drain.has_begun()
    stop.told, stop.now_s = False, TIMEOUT_S / 2
    assert stop.drain.has_begun() and not stop.drain.is_over()
    stop.now_s = TIMEOUT_S - 0.5
    assert stop.drain.is_over()


def test_ray_serve_knows_a_stopping_replica_by_the_name_that_is_asked_for() -> None:
    assert not replica_is_stopping()
    source = inspect.getsource(replica)
    assert "self._replica_impl: Replica" in source
    assert "self._shutting_down = True" in inspect.getsource(replica.Replica._perform_graceful_shutdown)


def test_without_a_stop_nothing_is_refused(codec: TextCodec) -> None:
    app: Any = create_app(ScriptedService(says(SOME)), codec, LIMITS)
    exchange = asyncio.run(Exchange([BODY]).run(app, COMPLETIONS))
    assert exchange.status == 200
