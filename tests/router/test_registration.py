"""Workers come into service once, empty, and only with the vocabulary of those that are there."""

import asyncio

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, ScriptedWorker
from tests.router.helpers import (
    ask,
    ask_all,
    assert_nothing_is_left,
    in_service,
    make_router,
    plainly,
    request,
    run,
    serving,
    turns,
)
from workers.errors import ConfigurationError, LinkClosedError
from workers.messages import ReleaseRequest, WorkerRole, WorkerStats


def test_a_new_worker_is_told_to_forget_what_an_earlier_router_left_there() -> None:
    target = ScriptedTarget()

    async def test() -> None:
        async with serving(target):
            assert target.messages == [ReleaseRequest(None)]

    run(test)


def test_registering_again_is_a_no_op_also_in_the_middle_of_a_request() -> None:
    asked = [request(max_tokens=40, number=number) for number in range(3)]
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter) as router:
            tasks = [asyncio.create_task(ask(router, each)) for each in asked]
            while not all(task.done() for task in tasks):
                await router.register(target.registration, target)
                await router.register(drafter.registration, drafter)
                await asyncio.sleep(0)
            assert [task.result().tokens for task in tasks] == [plainly(each) for each in asked]
            assert target.messages.count(ReleaseRequest(None)) == 1
            assert drafter.messages.count(ReleaseRequest(None)) == 1
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_worker_registered_twice_at_the_same_time_serves_once() -> None:
    asked = [request(number=number) for number in range(3)]
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        router = make_router()
        tasks = [asyncio.create_task(ask(router, each)) for each in asked]
        await turns()
        workers: list[ScriptedWorker] = [target, drafter, target, drafter]
        await asyncio.gather(*(router.register(worker.registration, worker) for worker in workers))
        answers = await asyncio.gather(*tasks)
        assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
        assert len((await router.status()).workers) == 2
        await assert_nothing_is_left(router, target, drafter)
        steps = target.steps
        await turns(20)
        assert target.steps == steps  # nobody goes on with sequences that have ended
        await router.close()

    run(test)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_worker_with_another_vocabulary_size_is_refused(at_once: bool) -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter(vocabulary_size=33)

    async def test() -> None:
        router = make_router()
        if at_once:
            results = await asyncio.gather(
                router.register(target.registration, target),
                router.register(drafter.registration, drafter),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [type(None), ConfigurationError]
        else:
            await router.register(target.registration, target)
            with pytest.raises(ConfigurationError, match="toy-draft has 33 token ids, toy has 32"):
                await router.register(drafter.registration, drafter)
        assert in_service(router) == {"target-0"}
        assert (await ask(router, request())).tokens == plainly(request())
        await router.close()

    run(test)


def test_a_worker_that_does_not_answer_is_not_taken_into_service() -> None:
    target = ScriptedTarget(dead=True)

    async def test() -> None:
        router = make_router()
        with pytest.raises(LinkClosedError):
            await router.register(target.registration, target)
        assert not (await router.status()).can_answer

    run(test)


def test_unregistering_a_worker_that_is_not_in_service_is_a_no_op() -> None:
    async def test() -> None:
        async with serving(ScriptedTarget()) as router:
            router.unregister("nobody")
            assert in_service(router) == {"target-0"}

    run(test)


def test_the_status_tells_who_serves_and_what_they_hold() -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter) as router:
            brief = await router.status()
            assert brief.can_answer
            assert [worker.registration for worker in brief.workers] == [target.registration, drafter.registration]
            assert [worker.stats for worker in brief.workers] == [None, None]
            drafter.die()
            full = await router.status(with_worker_stats=True)
            stats = {worker.registration.role: worker.stats for worker in full.workers}
            assert stats == {WorkerRole.DRAFT: None, WorkerRole.TARGET: WorkerStats(0, 4096, 4096)}

    run(test)


def test_sequences_are_spread_over_the_targets() -> None:
    asked = [request(number=number) for number in range(6)]
    first, second = ScriptedTarget(), ScriptedTarget("target-1")

    async def test() -> None:
        async with serving(first, second) as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, first, second)
        assert first.steps > 0
        assert second.steps > 0

    run(test)


def test_a_drafter_that_comes_later_drafts_for_what_is_running() -> None:
    asked = request(max_tokens=60)
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        async with serving(target) as router:
            task = asyncio.create_task(ask(router, asked))
            await turns(8)
            await router.register(drafter.registration, drafter)
            answer = await task
            assert answer.tokens == plainly(asked)
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens > 0
            assert answer.usage.fallback_rounds > 0
            await assert_nothing_is_left(router, target, drafter)

    run(test)
