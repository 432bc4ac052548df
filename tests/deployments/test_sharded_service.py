"""Several routers as one service: any of them gives the same answers, and what befalls one is the others' business."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from deployments import known_router, sharded_service
from deployments.generation import GenerationService
from deployments.http_app import create_app
from deployments.metrics_endpoint import exposition
from deployments.resuming import ResumingService
from deployments.sharded_service import ShardedService
from deployments.text import TextCodec
from tests.deployments.helpers import LIMITS, SOME, says
from tests.fakes import ScriptedDrafter, ScriptedService, ScriptedTarget, ScriptedWorker, sometimes_right
from tests.router.helpers import (
    Answer,
    ask,
    assert_nothing_is_left,
    make_router,
    plainly,
    request,
    run,
    until,
)
from workers.errors import RouterLostError, UnavailableError
from workers.messages import GenerationEvent, GenerationRequest, MetricsSnapshot, RouterStatus, token_ids
from workers.router.router import Router


class Process:
    """A router that can be killed: then its clients notice at once, and new ones are told that it is gone.

    If it is `stuck` instead, nobody is told anything.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.dead = asyncio.Event()
        self.stuck = asyncio.Event()
        self.begun: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        self.begun.append(request)
        async with contextlib.aclosing(self.router.generate(request)) as events:  # type: ignore[type-var]
            while True:
                waiting = asyncio.ensure_future(anext(events, None))
                await self._or_death(waiting)
                event = waiting.result()
                if event is None:
                    return
                yield event

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`."""
        await self._answer()
        return await self.router.status(with_worker_stats)

    async def metrics(self) -> MetricsSnapshot:
        """See `GenerationService.metrics`."""
        await self._answer()
        return await self.router.metrics()

    async def _answer(self) -> None:
        if self.stuck.is_set():
            await asyncio.Event().wait()
        if self.dead.is_set():
            raise UnavailableError("the router is gone")

    async def _or_death(self, waiting: "asyncio.Future[Any]") -> None:
        death = asyncio.ensure_future(self.dead.wait())
        try:
            if self.stuck.is_set():
                await asyncio.Event().wait()
            await asyncio.wait({waiting, death}, return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise RouterLostError("the router was killed")
        finally:
            death.cancel()
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})


class Shards:
    """Two routers, each with a target and a drafter of its own."""

    def __init__(self, **limits: Any) -> None:
        self.workers: list[list[ScriptedWorker]] = [
            [
                ScriptedTarget(f"target-{number}", delay_s=0.001),
                ScriptedDrafter(sometimes_right(0.6), f"draft-{number}"),
            ]
            for number in range(2)
        ]
        self.processes = [Process(make_router(max_draft_tokens=3, **limits)) for _ in self.workers]
        self.service: GenerationService = ShardedService(
            {f"Router-{number}": process for number, process in enumerate(self.processes)},
            most_running=limits.get("max_running_sequences"),
        )

    async def start(self, *skipped: ScriptedWorker) -> None:
        """Register the workers."""
        for process, workers in zip(self.processes, self.workers, strict=True):
            for worker in workers:
                if worker not in skipped:
                    await process.router.register(worker.registration, worker)

    async def ask_all(self, requests: list[GenerationRequest]) -> list[Answer]:
        """Take all requests at once."""
        return list(await asyncio.gather(*(ask(self.service, each) for each in requests)))  # type: ignore[arg-type]

    async def end(self) -> None:
        """No sequence may be left at a router that lives, and no worker have seen what it could not follow."""
        for process, workers in zip(self.processes, self.workers, strict=True):
            if not (process.dead.is_set() or process.stuck.is_set()):
                await assert_nothing_is_left(process.router, *workers)
                assert [violation for worker in workers for violation in worker.violations] == []
            await process.router.close()


def with_shards(test: Callable[[Shards], Awaitable[None]], **limits: Any) -> None:
    """Run `test` with two routers, whose workers it starts."""

    async def body() -> None:
        shards = Shards(**limits)
        await test(shards)
        await shards.end()

    run(body)


POPULATION = [request(3 + number % 5, max_tokens=12 + number % 9, number=number) for number in range(32)]


def test_a_population_gets_what_one_target_alone_would_say_from_two_routers() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        answers = await shards.ask_all(POPULATION)
        assert [answer.tokens for answer in answers] == [plainly(asked) for asked in POPULATION]
        begun = [len(process.begun) for process in shards.processes]
        assert sum(begun) == len(POPULATION) and min(begun) >= len(POPULATION) // 4

    with_shards(test)


def test_clients_that_leave_free_their_blocks_at_their_own_router() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        answers = [Answer() for _ in POPULATION]
        asking = [
            asyncio.create_task(ask(shards.service, asked, into))  # type: ignore[arg-type]
            for asked, into in zip(POPULATION, answers, strict=True)
        ]
        await until(lambda: sum(bool(answer.chunks) for answer in answers) >= 16)
        for task in asking[::2]:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for asked, answer in zip(POPULATION[1::2], answers[1::2], strict=True):
            assert answer.tokens == plainly(asked)

    with_shards(test)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers are given up soon."""
    monkeypatch.setattr(known_router, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(known_router, "LOST_AFTER_S", 0.2)
    for module in (known_router, sharded_service):
        monkeypatch.setattr(module, "ANSWER_WITHIN_S", 0.1)


async def begin_population(shards: Shards) -> tuple[list[Answer], "asyncio.Future[list[None]]"]:
    """Ask everything of a service that resumes; return when enough has begun, with what ends when all has ended."""
    shards.service = ResumingService(shards.service)
    answers = [Answer() for _ in POPULATION]
    asking = [
        asyncio.create_task(ask(shards.service, asked, into))  # type: ignore[arg-type]
        for asked, into in zip(POPULATION, answers, strict=True)
    ]
    await until(lambda: sum(bool(answer.chunks) for answer in answers) >= 8)
    return answers, asyncio.gather(*asking)


async def assert_answered_without(lost: Process, shards: Shards, answers: list[Answer]) -> None:
    """All answers of the population are right, some of them begun at the router that is lost, and none is any more."""
    assert [answer.tokens for answer in answers] == [plainly(asked) for asked in POPULATION]
    begun = len(lost.begun)
    assert begun, "nothing was ever sent to the router that was lost"
    [late] = await shards.ask_all([lost.begun[0]])
    assert late.finish_reason is not None and len(lost.begun) == begun
    status = await shards.service.status()
    assert [report.answers for report in status.routers] == [False, True]
    assert status.can_answer and status.takes_requests


@pytest.mark.usefixtures("impatient")
def test_requests_whose_router_dies_end_at_the_other_one_with_the_same_ids() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        answers, asking = await begin_population(shards)
        shards.processes[0].dead.set()
        await asking
        await assert_answered_without(shards.processes[0], shards, answers)

    with_shards(test)


@pytest.mark.usefixtures("impatient")
def test_requests_whose_router_loses_its_last_target_go_on_where_there_is_one() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        answers, asking = await begin_population(shards)
        target = shards.workers[0][0]
        target.die()
        await asking
        assert [answer.tokens for answer in answers] == [plainly(asked) for asked in POPULATION]
        status = await shards.service.status()
        assert [(report.answers, report.running, report.waiting) for report in status.routers] == [(True, 0, 0)] * 2

    with_shards(test)


@pytest.mark.usefixtures("impatient")
def test_requests_that_a_stuck_router_does_not_begin_go_to_the_other_one() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        shards.service = ResumingService(shards.service)
        await shards.service.status()
        shards.processes[0].stuck.set()
        await assert_answered_without(shards.processes[0], shards, await shards.ask_all(POPULATION))

    with_shards(test)


def test_a_router_without_a_target_is_sent_nothing_until_it_has_one() -> None:
    async def test(shards: Shards) -> None:
        missing = shards.workers[1][0]
        await shards.start(missing)
        await shards.ask_all(POPULATION[:12])
        assert shards.processes[1].begun == []
        await shards.processes[1].router.register(missing.registration, missing)
        await shards.service.status()
        await shards.ask_all(POPULATION)
        assert shards.processes[1].begun

    with_shards(test)


def test_requests_are_refused_only_when_every_router_is_full() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        # All alike, so that one router is the home of all.
        asked = [replace(request(max_tokens=60), request_id=str(number)) for number in range(7)]
        answers = await shards.ask_all(asked)
        refused = [answer.failure for answer in answers if answer.failure is not None]
        assert [(failure.status, failure.code) for failure in refused] == [(429, "overloaded")] * 3
        assert [answer.tokens for answer in answers if answer.failure is None] == [plainly(asked[0])] * 4

    with_shards(test, max_running_sequences=1, max_waiting_sequences=1)


def test_a_request_that_finds_its_router_full_is_answered_by_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_router, "ASK_EVERY_S", 3600.0)

    async def test(shards: Shards) -> None:
        await shards.start()
        status = await shards.service.status()
        full, free = shards.processes
        # Others fill it, behind the back of this process, which has just looked.
        filling = [asyncio.create_task(ask(full.router, request(max_tokens=200, number=number))) for number in range(2)]
        await until(lambda: full.router.load().streams == 2)
        assert status.running == 0
        sent = 0
        while not full.begun:
            asked = request(number=sent, max_tokens=4)
            [answer] = await shards.ask_all([asked])
            assert answer.tokens == plainly(asked)
            sent += 1
        assert len(free.begun) == sent
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)

    with_shards(test, max_running_sequences=1, max_waiting_sequences=1)


def test_requests_go_to_the_router_that_has_their_drafter() -> None:
    async def test(shards: Shards) -> None:
        only = ScriptedDrafter(sometimes_right(0.6), "draft-other", name="other")
        shards.workers[1].append(only)
        await shards.start()
        answers = await shards.ask_all([request(number=number, drafter="other") for number in range(6)])
        assert {answer.usage.drafter for answer in answers} == {"other"}
        assert shards.processes[0].begun == []

    with_shards(test)


def test_status_and_metrics_add_up_and_tell_the_routers_apart() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        answers = await shards.ask_all(POPULATION)
        tokens = sum(len(answer.tokens) for answer in answers)
        status = await shards.service.status(with_worker_stats=True)
        assert status.totals.committed_tokens == tokens == sum(each.totals.committed_tokens for each in status.routers)
        assert {(worker.registration.worker_id, worker.router) for worker in status.workers} == {
            (f"{role}-{number}", f"Router-{number}") for role in ("target", "draft") for number in range(2)
        }
        assert len(status.workers) == 4 and all(worker.stats is not None for worker in status.workers)
        assert sorted(drafter.worker_id for drafter in status.drafters) == ["draft-0", "draft-1"]

        text = exposition(await shards.service.metrics())[0].decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        generated = families["leadout_generation_tokens"].samples
        assert [sample.labels["router"] for sample in generated] == ["Router-0", "Router-1"]
        assert [sample.value for sample in generated] == [each.totals.committed_tokens for each in status.routers]
        counts = [
            sample for sample in families["leadout_time_to_first_token_seconds"].samples if "_count" in sample.name
        ]
        assert sum(sample.value for sample in counts) == len(POPULATION)
        samples = [sample for family in families.values() for sample in family.samples]
        keys = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
        assert len(keys) == len(set(keys)) and all("router" in sample.labels for sample in samples)

    with_shards(test)


def test_one_router_that_is_told_to_drain_speaks_for_the_service() -> None:
    async def test(shards: Shards) -> None:
        await shards.start()
        assert shards.processes[0].router.drain_service() == 0
        status = await shards.service.status()
        assert status.draining and not status.takes_requests and status.can_answer
        assert not status.loading

    with_shards(test)


class Gone(ScriptedService):
    """A router that is not there."""

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """Raise UnavailableError."""
        raise UnavailableError("gone")

    async def metrics(self) -> MetricsSnapshot:
        """Raise UnavailableError."""
        raise UnavailableError("gone")


@pytest.mark.parametrize(
    ("routers", "statuses"),
    [
        ({"a": ScriptedService(says(SOME)), "b": Gone(says(SOME))}, (200, 200, 200, 200)),
        ({"a": ScriptedService(says(SOME), workers=()), "b": ScriptedService(says(SOME))}, (200, 200, 200, 200)),
        ({"a": ScriptedService(says(SOME), workers=()), "b": Gone(says(SOME))}, (503, 503, 200, 200)),
        ({"a": Gone(says(SOME)), "b": Gone(says(SOME))}, (503, 503, 503, 503)),
    ],
)
def test_probes_fail_only_if_no_router_can_answer(
    routers: dict[str, GenerationService], statuses: tuple[int, ...], codec: TextCodec
) -> None:
    with TestClient(create_app(ShardedService(routers), codec, LIMITS), raise_server_exceptions=False) as client:
        assert (
            tuple(client.get(f"/{name}").status_code for name in ("health", "ready", "status", "metrics")) == statuses
        )


def test_without_any_router_a_request_waits_for_one_as_for_the_only_one() -> None:
    async def test() -> None:
        gone = ShardedService({"a": Gone(says(SOME)), "b": Gone(says(SOME))})
        with pytest.raises(RouterLostError):
            await anext(gone.generate(request()))
        returned = ScriptedService(says(SOME))
        service = ResumingService(ShardedService({"a": Gone(says(SOME)), "b": returned}))
        asked = replace(request(), prompt=token_ids([1]))
        assert [event async for event in service.generate(asked)] and returned.requests

    run(test)
