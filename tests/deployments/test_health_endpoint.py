"""What probes are told: cheaply, in bounded time, with the reason."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments import health_endpoint
from deployments.draining import Drain
from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.asgi import Exchange
from tests.deployments.helpers import LIMITS, SOME, error_of, says
from tests.fakes import TARGET, ScriptedService
from tests.limits import HANG_S
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
    """A router that does not even heed that nobody waits for its answer any more."""

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """Never return."""
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_do_not_wait_for_a_stuck_router(codec: TextCodec, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_endpoint, "PROBE_TIMEOUT_S", 0.05)
    app = create_app(StuckService(says(SOME)), codec, LIMITS)
    loop = asyncio.new_event_loop()  # not `run`, which would wait for the stuck call
    exchange = loop.run_until_complete(asyncio.wait_for(Exchange().run(app, path, "GET"), HANG_S))
    error = json.loads(exchange.body)["error"]
    assert exchange.status == 503 and "router" in error["message"]


def test_probes_take_two_seconds_at_most() -> None:
    assert health_endpoint.PROBE_TIMEOUT_S <= 2.0


def test_a_stopping_ingress_is_not_ready_and_still_healthy(codec: TextCodec) -> None:
    app = create_app(ScriptedService(says(SOME)), codec, LIMITS, Drain(lambda: True, 10.0))

    async def statuses() -> list[int]:
        return [(await Exchange().run(app, path, "GET")).status for path in ("/health", "/ready", "/v1/models")]

    assert asyncio.run(statuses()) == [200, 503, 200]
