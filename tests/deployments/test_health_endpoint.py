"""What probes are told: cheaply, in bounded time, with the reason."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.draining import Drain
from deployments.health_endpoint import PROBE_TIMEOUT_S
from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.asgi import Exchange
from tests.deployments.helpers import LIMITS, SOME, error_of, says
from tests.fakes import TARGET, ScriptedService
from tests.fakes.virtual_time import VirtualLoop, run_virtually
from workers.messages import RouterStatus, WorkerRole

SILENT, LEAVING = replace(TARGET, silent=True), replace(TARGET, draining=True)
DRAFTER = replace(TARGET, registration=replace(TARGET.registration, worker_id="d", role=WorkerRole.DRAFT))


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ({}, None, None),
        ({"workers": (TARGET, SILENT, LEAVING)}, None, None),
        ({"workers": (), "loading": True}, "loading", "loading"),
        ({"workers": (DRAFTER,), "loading": True}, "loading", "loading"),
        ({"workers": (DRAFTER,)}, "no_target", "no_target"),
        ({"workers": (SILENT, DRAFTER)}, "no_target", "no_target"),
        ({"workers": (LEAVING,)}, None, "draining"),
        ({"draining": True}, None, "draining"),
        ({"draining": True, "workers": ()}, "no_target", "draining"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_say_what_is_missing(
    client_of: Callable[..., Any], method: str, state: dict[str, Any], health: str | None, ready: str | None
) -> None:
    client = client_of(ScriptedService(says(SOME), **state))
    for path, code in (("/health", health), ("/ready", ready)):
        response = client.request(method, path)
        assert response.status_code == (503 if code else 200)
        if code:
            assert response.headers["retry-after"]
        if code and method == "GET":
            assert error_of(response, 503)["code"] == code


class StuckService(ScriptedService):
    """A router that does not even heed that nobody waits for its answer any more, until it is `freed`."""

    def __init__(self) -> None:
        super().__init__(says(SOME))
        self.freed = asyncio.Event()

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """Return late."""
        while not self.freed.is_set():
            try:
                await self.freed.wait()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
        return await super().status()


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_do_not_wait_for_a_stuck_router_and_take_two_seconds_at_most(codec: TextCodec, path: str) -> None:
    async def probe(loop: VirtualLoop) -> tuple[Exchange, float]:
        service = StuckService()
        exchange = await Exchange().run(create_app(service, codec, LIMITS), path, "GET")
        answered_s = loop.now_s
        service.freed.set()  # or its task would outlive the loop
        return exchange, answered_s

    exchange, answered_s = run_virtually(probe)
    error = json.loads(exchange.body)["error"]
    assert exchange.status == 503 and "router" in error["message"]
    assert answered_s == pytest.approx(PROBE_TIMEOUT_S, abs=0.01) and PROBE_TIMEOUT_S <= 2.0


def test_a_stopping_ingress_is_not_ready_and_still_healthy(codec: TextCodec) -> None:
    app = create_app(ScriptedService(says(SOME)), codec, LIMITS, Drain(lambda: True, 10.0))

    async def statuses() -> list[int]:
        return [(await Exchange().run(app, path, "GET")).status for path in ("/health", "/ready", "/v1/models")]

    assert asyncio.run(statuses()) == [200, 503, 200]
