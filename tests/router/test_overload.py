"""More requests than fit: refused at once, or served in order and within the queue's time."""

import asyncio

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget
from tests.router.helpers import (
    Answer,
    ask,
    ask_all,
    assert_nothing_is_left,
    make_router,
    plainly,
    request,
    run,
    serving,
    turns,
)
from workers.messages import GenerationFailed


def failure_of(answer: Answer) -> GenerationFailed:
    assert answer.failure is not None
    return answer.failure


def test_two_run_two_wait_and_the_rest_of_fifty_is_refused_at_once() -> None:
    asked = [request(max_tokens=10, number=number) for number in range(50)]
    target, drafter = ScriptedTarget(delay_s=0.02), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter, max_running_sequences=2, max_waiting_sequences=2) as router:
            tasks = [asyncio.create_task(ask(router, each)) for each in asked]
            await turns(3)
            # At once: the target has not even answered its first step.
            assert sum(task.done() for task in tasks) == 46
            status = await router.status()
            assert (status.running, status.waiting) == (2, 2)
            answers = await asyncio.gather(*tasks)
            for each, answer in zip(asked[:4], answers[:4], strict=True):
                assert answer.tokens == plainly(each)
            for answer in answers[4:]:
                assert (failure_of(answer).status, failure_of(answer).code) == (429, "overloaded")
                assert answer.tokens == []
            await assert_nothing_is_left(router, target, drafter)
            assert (await ask(router, asked[49])).tokens == plainly(asked[49])

    run(test)


def test_without_a_queue_a_free_router_still_answers() -> None:
    asked = [request(number=number) for number in range(3)]

    async def test() -> None:
        async with serving(ScriptedTarget(), max_running_sequences=2, max_waiting_sequences=0) as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers[:2]] == [plainly(each) for each in asked[:2]]
            assert failure_of(answers[2]).status == 429

    run(test)


def test_a_request_that_waits_longer_than_the_queue_allows_gets_503_and_the_others_finish() -> None:
    asked = [request(max_tokens=40, number=number) for number in range(2)]
    target = ScriptedTarget(delay_s=0.005)

    async def test() -> None:
        async with serving(target, max_running_sequences=1, queue_timeout_s=0.03) as router:
            first, second = await ask_all(router, asked)
            assert first.tokens == plainly(asked[0])
            assert failure_of(second).status == 503
            assert "every target is busy" in failure_of(second).message
            await assert_nothing_is_left(router, target)

    run(test)


def test_without_a_target_a_request_gets_503_after_the_queue_timeout() -> None:
    async def test() -> None:
        router = make_router(queue_timeout_s=0.02)
        answer = await ask(router, request())
        assert failure_of(answer).status == 503
        assert "no target is available" in failure_of(answer).message
        assert (await router.status()).waiting == 0

    run(test)


def test_requests_that_wait_for_the_first_target_are_served_when_it_comes() -> None:
    asked = [request(number=number) for number in range(5)]

    async def test() -> None:
        router, target = make_router(), ScriptedTarget()
        tasks = [asyncio.create_task(ask(router, each)) for each in asked]
        await turns()
        assert (await router.status()).waiting == 5
        await router.register(target.registration, target)
        assert [answer.tokens for answer in await asyncio.gather(*tasks)] == [plainly(each) for each in asked]
        await assert_nothing_is_left(router, target)
        await router.close()

    run(test)


@pytest.mark.parametrize("running", [1, 64])
def test_time_in_the_queue_counts_towards_the_requests_timeout(running: int) -> None:
    target = ScriptedTarget(delay_s=0.005)

    async def test() -> None:
        async with serving(target, max_running_sequences=running) as router:
            answers = await ask_all(
                router, [request(max_tokens=200, number=number, timeout_s=0.05) for number in range(2)]
            )
            assert [failure_of(answer).status for answer in answers] == [504, 504]
            await assert_nothing_is_left(router, target)

    run(test)


def test_sequences_beyond_a_batch_take_turns() -> None:
    asked = [request(max_tokens=12, number=number) for number in range(7)]
    target, drafter = ScriptedTarget(), ScriptedDrafter()
    progress = [Answer() for _ in asked]

    async def test() -> None:
        async with serving(target, drafter, max_batch_sequences=2, max_draft_tokens=0) as router:
            tasks = [asyncio.create_task(ask(router, each, into)) for each, into in zip(asked, progress, strict=True)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                counts = [len(answer.tokens) for answer in progress]
                # Nobody is served a third time before everybody was served a second time.
                assert max(counts) - min(counts) <= 2
            assert [answer.tokens for answer in progress] == [plainly(each) for each in asked]

    run(test)
