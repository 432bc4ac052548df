"""KV blocks: whatever ends a request, its blocks come back, on workers and in ledgers; and nobody ever overdraws."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests.fakes import (
    REQUEST_IN_SERVICE,
    ContextNotingLink,
    ScriptedDrafter,
    ScriptedTarget,
    ScriptedWorker,
    sometimes_right,
    toy_next,
)
from tests.router.helpers import (
    Answer,
    ChangingLengths,
    ask,
    ask_all,
    assert_nothing_is_left,
    make_router,
    plainly,
    request,
    run,
    serving,
    turns,
    until,
)
from workers.messages import ReleaseRequest
from workers.router.router import Router


async def cancel(task: asyncio.Task[Answer]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("blocks", [30, 4096])
@pytest.mark.parametrize("running", [3, 64])
def test_b51_fifty_requests_of_all_lengths_of_which_ten_are_aborted_leave_nothing_behind(
    running: int, blocks: int
) -> None:
    # The longest, 50 + 50 tokens, is 25 blocks: of 30, sequences are preempted again and again.
    asked = [request(length, 50, length) for length in range(1, 51)]
    aborted = set(range(2, 50, 5))
    target = ScriptedTarget(total_blocks=blocks)
    drafter = ScriptedDrafter(sometimes_right(70), total_blocks=blocks)

    async def abort_after(router: Router, number: int, chunks: int) -> None:
        partial = Answer()
        task = asyncio.create_task(ask(router, asked[number], into=partial))
        await until(lambda: len(partial.chunks) >= chunks)
        await cancel(task)
        assert partial.tokens == plainly(asked[number])[: len(partial.tokens)]

    async def test() -> None:
        async with serving(target, drafter, prefill_chunk_tokens=16, max_running_sequences=running) as router:
            kept = [number for number in range(50) if number not in aborted]
            tasks = [asyncio.create_task(ask(router, asked[number])) for number in kept]
            await asyncio.gather(*(abort_after(router, number, number % 4) for number in aborted))
            answers = await asyncio.gather(*tasks)
            for number, answer in zip(kept, answers, strict=True):
                assert answer.tokens == plainly(asked[number])
            assert ((await router.status()).totals.preemptions > 0) is (blocks == 30)
            await assert_nothing_is_left(router, target, drafter)

    run(test)


@pytest.mark.parametrize("loop_turns", range(14))
def test_a_request_cancelled_at_any_moment_leaves_nothing_behind(loop_turns: int) -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter, prefill_chunk_tokens=4) as router:
            # The other one ends, and its release is on its way, at every distance from the cancellation.
            for others_turns in range(14):
                # Rounds are in progress when the two come, so that they join at every point of one.
                staying = asyncio.create_task(ask(router, request(1, 40, 3)))
                await turns(4)
                leaving = asyncio.create_task(ask(router, request(6, 30, 1)))
                other = asyncio.create_task(ask(router, request(1, 30, 2)))
                for turn in range(14):
                    if turn == loop_turns:
                        leaving.cancel()
                    if turn == others_turns:
                        other.cancel()
                    await asyncio.sleep(0)
                await asyncio.gather(leaving, other, return_exceptions=True)
                assert (await staying).tokens == plainly(request(1, 40, 3))
                await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_sequence_that_ends_after_its_round_was_planned_is_not_started_again_at_the_drafter() -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()

    async def test() -> None:
        def lengths() -> Iterator[int]:
            # The policy is asked while the round is planned; the drafter is asked some turns of the loop later.
            while True:
                for running in router._running():
                    asyncio.get_running_loop().call_soon(router._end, running)
                yield 4

        router = make_router(ChangingLengths(lengths()))
        await router.register(target.registration, target)
        await router.register(drafter.registration, drafter)
        task = asyncio.create_task(ask(router, request()))
        await turns(20)
        await cancel(task)
        await assert_nothing_is_left(router, target, drafter)
        await router.close()

    run(test)


@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_worker_with_blocks_for_one_sequence_is_never_asked_to_hold_two(with_drafter: bool) -> None:
    # 20 + 20 tokens are 10 blocks: a step for the next sequence must not overtake the release of the last one.
    asked = [request(20, 20, number) for number in range(6)]
    workers: list[ScriptedWorker] = [ScriptedTarget(total_blocks=10)]
    workers += [ScriptedDrafter(total_blocks=10)] if with_drafter else []

    async def test() -> None:
        async with serving(*workers) as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, *workers)

    run(test)


def test_sequences_are_decoded_plainly_until_there_is_room_at_the_drafter() -> None:
    asked = [request(20, 20, number) for number in range(3)]
    target, drafter = ScriptedTarget(), ScriptedDrafter(total_blocks=10)

    async def test() -> None:
        async with serving(target, drafter) as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            assert [answer.usage.fallback_rounds > 0 for answer in answers] == [False, True, True]
            assert [answer.usage.draft_tokens > 0 for answer in answers[:2]] == [True, True]
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_request_that_runs_out_of_time_leaves_nothing_behind() -> None:
    target, drafter = ScriptedTarget(delay_s=0.01), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter) as router:
            answer = await ask(router, request(max_tokens=100_000, timeout_s=0.05))
            assert answer.failure is not None
            assert answer.failure.status == 504
            assert answer.tokens == plainly(request(max_tokens=len(answer.tokens))) if answer.tokens else True
            await assert_nothing_is_left(router, target, drafter)

    # The context of the fakes would end such a request; that it is so long only keeps it from finishing first.
    target.context_length = drafter.context_length = 1_000_000
    target.total_blocks = drafter.total_blocks = 1_000_000
    run(test)


def test_a_fault_ends_its_own_sequence_alone() -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()
    target.faulty_first_token = int(request(number=2).prompt[0])
    asked = [request(number=number) for number in range(4)]

    async def test() -> None:
        async with serving(target, drafter) as router:
            answers = await ask_all(router, asked)
            for number, answer in enumerate(answers):
                if number == 2:
                    assert answer.failure is not None
                    assert answer.failure.status == 500
                    assert "not finite" in answer.failure.message
                    assert answer.tokens == []
                else:
                    assert answer.failure is None
                    assert answer.tokens == plainly(asked[number])
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_releases_of_sequences_that_end_together_travel_together() -> None:
    target = ScriptedTarget()

    async def test() -> None:
        async with serving(target) as router:
            await ask_all(router, [request(max_tokens=5, number=number) for number in range(8)])
            await turns()

    run(test)

    releases = [message for message in target.messages if isinstance(message, ReleaseRequest)][1:]
    assert [len(message.sequence_ids or ()) for message in releases] == [8]


def test_closing_the_router_ends_what_runs_with_an_error() -> None:
    target, drafter = ScriptedTarget(delay_s=0.01), ScriptedDrafter(toy_next)

    async def test() -> Answer:
        async with serving(target, drafter, max_running_sequences=1) as router:
            waiting = asyncio.create_task(ask(router, request(max_tokens=200, number=1)))
            running = asyncio.create_task(ask(router, request(max_tokens=200, number=2)))
            await turns()
            await router.close()
            first, second = await waiting, await running
            assert first.failure is not None
            assert second.failure is not None
            assert first.failure.status == second.failure.status == 503
            return first

    run(test)


def test_no_message_to_a_worker_belongs_to_a_request_whose_cancellation_would_take_it_along() -> None:
    target, drafter = ScriptedTarget(delay_s=0.005), ScriptedDrafter()
    links = [ContextNotingLink(target), ContextNotingLink(drafter)]

    async def one_request(router: Router) -> None:
        REQUEST_IN_SERVICE.set("generate")
        task = asyncio.create_task(ask(router, request(max_tokens=200)))
        await until(lambda: len(links[1].senders) > 3)
        await cancel(task)

    async def register(router: Router) -> None:
        REQUEST_IN_SERVICE.set("register")
        for worker, link in zip((target, drafter), links, strict=True):
            await router.register(worker.registration, link)
            link.senders.clear()

    async def test() -> None:
        router = make_router()
        await asyncio.create_task(register(router))
        await asyncio.create_task(one_request(router))
        await assert_nothing_is_left(router, target, drafter)
        await router.close()

    run(test)

    assert set(links[0].senders) == set(links[1].senders) == {None}
    assert any(isinstance(message, ReleaseRequest) and message.sequence_ids for message in target.messages)
