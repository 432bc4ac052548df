"""Draining: what has begun is finished, nothing new begins, probes are answered to the end."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from deployments.draining import DrainGate, Draining
from tests.deployments.asgi import Exchange, until
from workers.errors import UnavailableError


class Held:
    """An application that answers once it is let, or fails."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            await self.let.wait()
        if self.fails:
            raise RuntimeError("a bug")
        await PlainTextResponse("done")(scope, receive, send)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 30.0)

    asyncio.run(bounded())


def test_running_requests_finish_and_new_ones_are_refused() -> None:
    async def test() -> None:
        app, draining = Held(), Draining()
        gate = DrainGate(app, draining)
        running = asyncio.create_task(Exchange().run(gate, "/v1/completions"))
        await until(lambda: draining.in_progress == 1)
        draining.check()
        draining.begin()
        with pytest.raises(UnavailableError, match="stop"):
            draining.check()
        refused = await Exchange([b"{}"]).run(gate, "/v1/completions")
        assert refused.status == 503 and refused.read == 0
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        assert (await Exchange().run(gate, "/health", "GET")).status == 200
        assert not await draining.wait_until_idle(0.01)
        app.let.set()
        assert await draining.wait_until_idle(10.0)
        assert (await running).body == b"done" and draining.in_progress == 0

    run(test())


def test_requests_that_fail_or_are_cancelled_do_not_hold_up_the_end() -> None:
    async def test() -> None:
        app, draining = Held(), Draining()
        gate = DrainGate(app, draining)
        cancelled = asyncio.create_task(Exchange().run(gate, "/v1/completions"))
        await until(lambda: draining.in_progress == 1)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        app.fails = True
        app.let.set()
        with pytest.raises(RuntimeError):
            await Exchange().run(gate, "/v1/completions")
        draining.begin()
        assert draining.in_progress == 0 and await draining.wait_until_idle(0.0)

    run(test())


def test_an_idle_process_may_end_at_once() -> None:
    async def test() -> None:
        assert await Draining().wait_until_idle(0.0)

    run(test())
