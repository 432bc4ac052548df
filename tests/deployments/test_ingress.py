"""The router behind a Serve handle: events as they come; one that is lost is an error of its own, never a hang."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import RpcError
from ray.exceptions import ActorDiedError, ActorUnavailableError

from deployments.app import serving_limits
from deployments.config import parse_config
from deployments.draining import Drain
from deployments.ingress import RouterClient
from deployments.preflight import ServedModel
from tests.fakes import in_blocks
from workers.errors import RouterLostError, UnavailableError
from workers.messages import GenerationEvent, GenerationRequest, SamplingParams, StopConditions
from workers.messages import token_ids as ids

REQUEST = GenerationRequest("r", ids([1, 2]), SamplingParams(), StopConditions(8))
EVENTS = in_blocks([5, 6, 7], 1)


class Response:
    """What a handle's streaming call returns: events, then an error if there is one."""

    def __init__(self, events: Sequence[GenerationEvent], error: Exception | None) -> None:
        self.cancelled = False
        self._events, self._error = events, error

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for event in self._events:
            yield event
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """As Serve's."""
        self.cancelled = True


class Handle:
    """A Serve handle to a router that answers every call with `response`, and knows no status."""

    def __init__(self, response: Response) -> None:
        self.generate = SimpleNamespace(remote=lambda request: response)
        self.status = SimpleNamespace(remote=self._no_status)

    def options(self, **_: Any) -> "Handle":
        """As Serve's."""
        return self

    async def _no_status(self, with_worker_stats: bool) -> Any:
        raise RpcError


def client_of(response: Response) -> RouterClient:
    return RouterClient(Handle(response), Drain())  # type: ignore[arg-type]


async def all_of(events: AsyncIterator[GenerationEvent]) -> list[GenerationEvent]:
    return [event async for event in events]


def test_events_come_as_the_router_sends_them() -> None:
    assert asyncio.run(all_of(client_of(Response(EVENTS, None)).generate(REQUEST))) == EVENTS


def test_a_client_that_leaves_cancels_the_call() -> None:
    response = Response(EVENTS, None)

    async def run() -> None:
        events = client_of(response).generate(REQUEST)
        await anext(events)
        assert not response.cancelled
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert response.cancelled


@pytest.mark.parametrize("error", [RpcError(), ActorDiedError(), ActorUnavailableError("gone", b"0" * 16)], ids=repr)
def test_a_router_that_is_lost_is_told_apart_from_one_that_refuses(error: Exception) -> None:
    came: list[GenerationEvent] = []

    async def run() -> None:
        async for event in client_of(Response(EVENTS[:2], error)).generate(REQUEST):
            came.append(event)

    with pytest.raises(RouterLostError):
        asyncio.run(run())
    assert came == EVENTS[:2]


def test_a_router_that_cannot_be_asked_has_no_status() -> None:
    with pytest.raises(UnavailableError):
        asyncio.run(client_of(Response([], None)).status())


def test_the_ingress_knows_how_much_the_router_takes() -> None:
    router = {"max_running_sequences": 3, "max_waiting_sequences": 4}
    config = parse_config({"target": {"model": "models/tiny-code/target"}, "router": router})
    limits = serving_limits(config, ServedModel("{}", 64, 257))
    assert (limits.most_sequences, limits.most_running) == (7, 3)


def test_several_routers_take_as_much_each() -> None:
    router = {"replicas": 2, "max_running_sequences": 3, "max_waiting_sequences": 4}
    config = parse_config({"target": {"model": "models/tiny-code/target", "replicas": 2}, "router": router})
    limits = serving_limits(config, ServedModel("{}", 64, 257))
    assert (limits.most_sequences, limits.most_running) == (14, 3)
