"""Workers that are told to go: their sequences move or finish, no request fails, and nothing comes back."""

import asyncio
import itertools

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, sometimes_right
from tests.router.helpers import (
    Answer,
    ask,
    ask_all,
    assert_nothing_is_left,
    checks_done,
    first_check_begins,
    in_service,
    plainly,
    request,
    run,
    serving,
    turns,
    until,
)
from workers.router.heartbeats import SILENT_AFTER_S, Heartbeats


@pytest.mark.parametrize("loop_turns", [0, 1, 2, 3, 5, 8, 13, 21])
def test_a_draining_target_hands_its_sequences_over_at_once(loop_turns: int) -> None:
    asked = [request(max_tokens=40, number=number) for number in range(4)]
    first, second, drafter = ScriptedTarget(), ScriptedTarget("target-1"), ScriptedDrafter(sometimes_right(60))

    async def test() -> None:
        async with serving(first, second, drafter, max_draft_tokens=3, max_cohorts=2) as router:
            tasks = [asyncio.create_task(ask(router, each)) for each in asked]
            await turns(loop_turns)
            assert router.drain("target-0") == 0
            steps = first.steps
            answers = await asyncio.gather(*tasks)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            assert first.steps <= steps + 2  # of each cohort, the step that was on its way
            await assert_nothing_is_left(router, first, second, drafter)
            router.unregister("target-0")
            assert in_service(router) == {"target-1", "draft-0"}

    run(test)


def test_without_another_target_sequences_finish_and_new_ones_wait_for_the_next() -> None:
    old, new = request(max_tokens=60), request(max_tokens=10, number=1)
    first, second = ScriptedTarget(), ScriptedTarget("target-1")

    async def test() -> None:
        async with serving(first, max_draft_tokens=0) as router:
            begun = Answer()
            running = asyncio.create_task(ask(router, old, begun))
            await until(lambda: bool(begun.tokens))
            assert router.drain("target-0") == 1
            late = asyncio.create_task(ask(router, new))
            await running
            assert begun.tokens == plainly(old)
            assert router.drain("target-0") == 0
            steps = first.steps
            await turns(20)
            assert not late.done() and first.steps == steps
            router.unregister("target-0")
            await router.register(second.registration, second)
            assert (await late).tokens == plainly(new)
            await assert_nothing_is_left(router, first, second)

    run(test)


def test_a_sequence_moves_later_when_another_target_gets_room() -> None:
    asked = [request(length=5, max_tokens=27, number=number) for number in range(2)]
    first = ScriptedTarget(total_blocks=9, delay_s=0.001)
    second = ScriptedTarget("target-1", total_blocks=9, delay_s=0.001)

    async def test() -> None:
        async with serving(first, second, max_draft_tokens=0) as router:
            begun = [Answer(), Answer()]
            tasks = [asyncio.create_task(ask(router, *both)) for both in zip(asked, begun, strict=True)]
            await until(lambda: all(len(answer.tokens) > 16 for answer in begun))
            leaving = "target-0" if len(first.held) else "target-1"
            left = router.drain(leaving)
            assert left == 1
            while left:
                await asyncio.sleep(0)
                left = router.drain(leaving)
            await asyncio.gather(*tasks)
            assert [answer.tokens for answer in begun] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, first, second)

    run(test)


def test_what_is_left_when_the_time_is_up_goes_on_at_the_next_target() -> None:
    asked = request(max_tokens=60)
    targets = [ScriptedTarget(f"target-{number}") for number in range(6)]

    async def test() -> None:
        async with serving(targets[0], max_draft_tokens=0) as router:
            answer = Answer()
            task = asyncio.create_task(ask(router, asked, answer))
            # More often than a sequence may lose its target by failures.
            for leaving, coming in itertools.pairwise(targets):
                await until(lambda: in_service(router) != set() and bool(answer.tokens))
                assert router.drain(leaving.worker_id) == 1
                router.unregister(leaving.worker_id)
                await router.register(coming.registration, coming)
            await task
            assert answer.tokens == plainly(asked)

    run(test)


def test_a_draining_drafter_leaves_its_sequences_to_another_one() -> None:
    asked = request(max_tokens=60)
    target, leaving = ScriptedTarget(), ScriptedDrafter()
    staying = ScriptedDrafter(worker_id="draft-1", name="other")

    async def test() -> None:
        async with serving(target, leaving, max_draft_tokens=2) as router:
            answer = Answer()
            task = asyncio.create_task(ask(router, asked, answer))
            await until(lambda: leaving.steps > 2)
            await router.register(staying.registration, staying)
            assert router.drain("draft-0") == 0
            steps = leaving.steps
            await task
            assert answer.tokens == plainly(asked)
            assert (answer.usage.drafter, answer.usage.fallback_rounds) == ("other", 0)
            assert leaving.steps <= steps + 1 and staying.steps > 2

    run(test)


def test_a_worker_that_has_drained_cannot_come_back_by_a_late_registration() -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter) as router:
            for worker in (target, drafter):
                router.drain(worker.worker_id)
                router.unregister(worker.worker_id)
                await router.register(worker.registration, worker)
            assert in_service(router) == set()

    run(test)


def test_an_online_check_does_not_hold_a_draining_target() -> None:
    asked = request(max_tokens=40)
    first, second, drafter = ScriptedTarget(), ScriptedTarget("target-1"), ScriptedDrafter()

    async def test() -> None:
        async with serving(first, drafter, check_share=1.0) as router:
            await ask(router, asked)
            await first_check_begins(router)
            assert router.drain("target-0") == 0
            await turns()
            assert first.held == {}
            await router.register(second.registration, second)
            assert (await checks_done(router)).checked == 1

    run(test)


def test_a_draining_service_finishes_what_it_has_and_refuses_what_comes() -> None:
    asked = [request(max_tokens=40, number=number) for number in range(3)]
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter, max_running_sequences=2) as router:
            tasks = [asyncio.create_task(ask(router, each)) for each in asked]
            await turns()
            assert router.drain_service() == 3  # two run, one waits
            refused = await ask(router, request(number=9))
            assert refused.failure is not None
            assert (refused.failure.status, refused.failure.code) == (503, "draining")
            answers = await asyncio.gather(*tasks)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            assert router.drain_service() == 0
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_the_status_tells_what_loads_and_what_drains() -> None:
    first, second = ScriptedTarget(), ScriptedTarget("target-1")

    async def test() -> None:
        async with serving() as router:
            loading = await router.status()
            assert (loading.loading, loading.can_answer, loading.takes_requests) == (True, False, False)
            await router.register(first.registration, first)
            assert (await router.status()).takes_requests
            router.drain("target-0")
            leaving = await router.status()
            assert (leaving.loading, leaving.can_answer, leaving.takes_requests) == (False, True, False)
            assert leaving.workers[0].draining
            await router.register(second.registration, second)
            assert (await router.status()).takes_requests
            router.unregister("target-0")
            router.unregister("target-1")
            gone = await router.status()
            assert (gone.loading, gone.can_answer) == (False, False)
            await router.register((third := ScriptedTarget("target-2")).registration, third)
            router.drain_service()
            draining = await router.status()
            assert (draining.draining, draining.can_answer, draining.takes_requests) == (True, True, False)

    run(test)


def test_a_worker_is_silent_when_its_beats_cease_and_until_they_resume() -> None:
    now_s = 0.0
    beats = Heartbeats(lambda: now_s)
    assert not beats.is_silent("target-0")  # nobody promised beats
    beats.beat("target-0")
    now_s = SILENT_AFTER_S
    assert not beats.is_silent("target-0")
    now_s += 0.1
    assert beats.is_silent("target-0")
    beats.beat("target-0")
    assert not beats.is_silent("target-0")
    now_s *= 3
    beats.forget("target-0")
    assert not beats.is_silent("target-0")


def test_requests_that_overtake_nobody_are_answered_while_a_target_drains() -> None:
    asked = [request(max_tokens=20, number=number) for number in range(6)]
    first, second = ScriptedTarget(), ScriptedTarget("target-1")

    async def test() -> None:
        async with serving(first, second, max_running_sequences=2) as router:
            answering = asyncio.create_task(ask_all(router, asked))
            await turns()
            router.drain("target-1")
            answers = await answering
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, first, second)

    run(test)
