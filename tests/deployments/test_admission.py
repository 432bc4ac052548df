"""The ingress refuses by itself what a full router would refuse, and never more than that."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.admission import FullRouterGate
from deployments.generation import generate_choices
from deployments.text import TextCodec
from tests.deployments.helpers import COMPLETIONS, error_of, says
from tests.fakes import ScriptedService, in_blocks
from workers.messages import (
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    SamplingParams,
    StopConditions,
    TokenChunk,
    token_ids,
)

LONG = in_blocks([5] * 50, 1)


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, token_ids([1, 2]), SamplingParams(), StopConditions(50))


async def first_of(events: AsyncIterator[GenerationEvent]) -> GenerationEvent:
    return await anext(events)


def test_one_more_than_the_router_can_hold_is_refused_without_asking_it() -> None:
    service = ScriptedService(lambda _: LONG)
    gate = FullRouterGate(service, 2)

    async def run() -> None:
        held = [gate.generate(request(name)) for name in "ab"]
        assert all([isinstance(await first_of(events), TokenChunk) for events in held])
        refusal = await first_of(gate.generate(request("c")))
        assert isinstance(refusal, GenerationFailed)
        assert (refusal.status, refusal.code) == (429, "overloaded")
        await held[0].aclose()  # type: ignore[attr-defined]
        assert isinstance(await first_of(gate.generate(request("d"))), TokenChunk)

    asyncio.run(run())
    assert [each.request_id for each in service.requests] == ["a", "b", "d"]


@pytest.mark.parametrize("ends", ["finished", "failed", "cancelled", "raised"])
def test_however_a_sequence_ends_its_place_is_free_again(ends: str) -> None:
    def script(_: GenerationRequest) -> list[GenerationEvent]:
        if ends == "raised":
            raise RuntimeError("boom")
        return [GenerationFailed(503, "gone", "target lost")] if ends == "failed" else LONG

    gate = FullRouterGate(ScriptedService(script, delay_s=0.001 if ends == "cancelled" else 0), 1)

    async def consume() -> list[GenerationEvent]:
        return [event async for event in gate.generate(request("a"))]

    async def run() -> None:
        task = asyncio.create_task(consume())
        while ends == "cancelled" and not gate.in_flight:
            await asyncio.sleep(0)
        if ends == "cancelled":
            task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() == (ends == "cancelled")
        assert gate.in_flight == 0

    asyncio.run(run())


def test_a_request_whose_choices_do_not_all_fit_leaves_no_place_taken(codec: TextCodec) -> None:
    service = ScriptedService(lambda _: LONG, delay_s=0.001)
    gate = FullRouterGate(service, 2)

    async def run() -> None:
        choices = generate_choices(gate, codec, [request(name) for name in "abc"])
        with pytest.raises(Exception, match="run or wait already"):
            async for _ in choices:
                pass
        assert gate.in_flight == 0

    asyncio.run(run())
    assert sorted(service.cancelled) == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_refused_in_json_with_a_time_to_come_back_while_the_admitted_finish(  # B49
    client_of: Callable[..., TestClient], stream: bool
) -> None:
    service = ScriptedService(says([70, 71, 72]))
    gate: Any = FullRouterGate(service, 2)
    client = client_of(gate)
    gate.in_flight = 2
    refused = client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert error_of(refused, 429)["code"] == "overloaded"
    assert refused.headers["retry-after"] == "1"
    assert service.requests == []
    gate.in_flight = 1
    admitted = client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert admitted.status_code == 200
    ended = json.loads(admitted.text.split("data: ")[-2]) if stream else admitted.json()
    assert ended["choices"][0]["finish_reason"] == "length"
