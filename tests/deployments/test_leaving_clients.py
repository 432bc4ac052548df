"""Clients that leave, whenever they do: the work stops, and the whole application holds nothing of it. Real models."""

import asyncio
import json
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from deployments.text import TextCodec
from tests.deployments.asgi import Exchange, until
from tests.deployments.helpers import COMPLETIONS
from tests.in_process import InProcessService, application, load, save_byte_llama, save_drafters
from tests.limits import HANG_S
from workers.engine.engine import Engine
from workers.router.config import RouterConfig

LONG: dict[str, Any] = {"prompt": "def f(", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
SHORT: dict[str, Any] = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, TextCodec]:
    folder = tmp_path_factory.mktemp("pair")
    drafter = save_drafters(save_byte_llama(folder), folder)["noisy"]
    return load(folder), load(drafter), TextCodec.load(str(folder))


def serving(engines: tuple[Engine, Engine, TextCodec], **router: Any) -> tuple[InProcessService, Any]:
    target, drafter, codec = engines
    service = InProcessService(target, {"noisy": drafter}, codec, RouterConfig(max_draft_tokens=3, **router))
    return service, application(service, codec)


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, HANG_S))


def send(body: dict[str, Any], app: Any) -> tuple[Exchange, "asyncio.Task[Exchange]"]:
    exchange = Exchange([json.dumps(body).encode()])
    return exchange, asyncio.create_task(exchange.run(app, COMPLETIONS))


async def until_nothing_is_held(service: InProcessService) -> None:
    while True:
        status = await service.status(with_worker_stats=True)
        stats = [worker.stats for worker in status.workers]
        free = all(each and each.sequences == 0 and each.free_blocks == each.total_blocks for each in stats)
        if status.running == status.waiting == 0 and free:
            return
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_when_its_client_leaves(engines: Any, stream: bool) -> None:  # B45
    service, app = serving(engines)

    async def test() -> None:
        exchange, task = send(LONG | {"stream": stream}, app)
        while (await service.status()).totals.committed_tokens < 3:
            await asyncio.sleep(0.001)
        exchange.gone.set()
        await task
        await until_nothing_is_held(service)
        committed = (await service.status()).totals.committed_tokens
        assert committed < LONG["max_tokens"]
        await asyncio.sleep(0.05)
        assert (await service.status()).totals.committed_tokens == committed

    run(test())


def test_clients_that_leave_at_random_moments_leave_nothing_behind(engines: Any) -> None:
    service, app = serving(engines, max_running_sequences=4, prefill_chunk_tokens=16)
    chance = random.Random(6)

    async def leave_some_time() -> str:
        prompt = "".join(chance.choices("abcdef \n", k=chance.choice([3, 60])))
        body = LONG | {"prompt": prompt, "max_tokens": 60, "n": chance.choice([1, 1, 3]), "seed": chance.randrange(99)}
        exchange, task = send(body | {"stream": chance.random() < 0.85, "temperature": chance.choice([0, 1])}, app)
        moment = chance.choice(["turns", "start", "events", "events"])
        turns, events = chance.randrange(80), chance.randint(1, 6)
        for _ in range(turns if moment == "turns" else 0):
            await asyncio.sleep(0)
        if moment == "events":
            await until(lambda: len(exchange.sent) >= events or task.done())
        ended = task.done()
        exchange.gone.set()
        await task
        return "finished" if ended else "cut in the middle" if exchange.status == 200 else "cut before the first token"

    async def test() -> None:
        first, task = send(SHORT, app)
        await task
        fates = await asyncio.gather(*(leave_some_time() for _ in range(40)))
        assert fates.count("cut before the first token") > 8 and fates.count("cut in the middle") > 8
        await until_nothing_is_held(service)
        again, task = send(SHORT, app)
        await task
        ids = [json.loads(each.body)["choices"][0]["token_ids"] for each in (first, again)]
        assert ids[0] == ids[1]

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_slow_requests_beyond_running_and_queue_are_refused_in_json_and_the_others_finish(  # B49
    engines: Any, stream: bool
) -> None:
    service, app = serving(engines, max_running_sequences=2, max_waiting_sequences=2)

    async def test() -> None:
        await service.status()  # the target is registered first
        sent = [send(LONG | {"max_tokens": 40, "seed": number, "stream": stream}, app) for number in range(50)]
        exchanges = await asyncio.gather(*(task for _, task in sent))
        admitted = [exchange for exchange in exchanges if exchange.status == 200]
        assert len(admitted) == 4
        for exchange in exchanges:
            if exchange not in admitted:
                assert exchange.error(429)["code"] == "overloaded"
                assert exchange.headers["retry-after"] == "1"
        assert all(b'"finish_reason":"length"' in exchange.body for exchange in admitted)
        await until_nothing_is_held(service)

    run(test())
