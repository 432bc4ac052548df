"""The online check uses idle capacity only: clients never wait for it, and all that it held comes back."""

import asyncio

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, ScriptedWorker, Trouble
from tests.router.helpers import (
    ask,
    ask_all,
    assert_nothing_is_left,
    checks_done,
    first_check_begins,
    make_router,
    plainly,
    request,
    run,
    serving,
    turns,
    until,
)
from workers.messages import OnlineCheckTotals, VerifyItem, VerifyRequest


def test_clients_that_need_the_row_of_a_check_get_it_at_once_and_the_check_is_made_later() -> None:
    target, drafter = ScriptedTarget(delay_s=0.002), ScriptedDrafter()

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0, max_running_sequences=1) as router:
            await ask(router, request(number=1))
            await first_check_begins(router)
            assert (await router.status()).running == 0
            task = asyncio.create_task(ask(router, request(number=2)))
            await turns(2)
            status = await router.status()
            assert (status.running, status.waiting) == (1, 0)
            assert not any(running.is_check for running in router._running())
            assert (await task).tokens == plainly(request(number=2))
            totals = await checks_done(router)
            await assert_nothing_is_left(router, target, drafter)
            return totals

    totals = run(test)
    assert (totals.checked, totals.mismatched, totals.dropped) == (2, 0, 0)
    assert totals.postponed == 1


def test_clients_that_need_the_kv_blocks_of_a_check_get_them() -> None:
    # 5 + 27 tokens are 8 blocks, of which 2 are needed at first: a check and a client begin together.
    target, drafter = ScriptedTarget(delay_s=0.002, total_blocks=8), ScriptedDrafter()

    second = request(max_tokens=27, number=2)

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0) as router:
            await ask(router, request(max_tokens=27, number=1))
            await first_check_begins(router)
            assert (await ask(router, second)).tokens == plainly(second)
            totals = await checks_done(router)
            await assert_nothing_is_left(router, target, drafter)
            return totals

    totals = run(test)
    assert (totals.checked, totals.postponed) == (2, 1)


def test_while_requests_wait_no_check_runs() -> None:
    asked = [request(5, 10, number) for number in range(12)]
    target = ScriptedTarget(delay_s=0.001)

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter(), check_share=1.0, max_running_sequences=2) as router:
            tasks = [asyncio.create_task(ask(router, each)) for each in asked]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                assert not (router._placement.waiting and any(running.is_check for running in router._running()))
            assert [task.result().tokens for task in tasks] == list(map(plainly, asked))
            return await checks_done(router)

    assert run(test).checked == 12


def steps_since(target: ScriptedTarget, first: int) -> list[tuple[VerifyItem, ...]]:
    return [message.items for message in target.messages[first:] if isinstance(message, VerifyRequest)]


def test_a_check_takes_no_row_of_a_full_batch() -> None:
    target = ScriptedTarget(delay_s=0.001)

    async def test() -> None:
        async with serving(target, ScriptedDrafter(), check_share=1.0, max_batch_sequences=2) as router:
            await ask(router, request(5, 150, 1))
            await first_check_begins(router)
            check = next(running.sequence.sequence_id for running in router._running())
            first = len(target.messages)
            clients = [asyncio.create_task(ask(router, request(5, 60, number))) for number in (2, 3)]
            await until(lambda: any(task.done() for task in clients))
            full = [step for step in steps_since(target, first) if len(step) == 2]
            assert len(full) > 5
            assert all(item.sequence_id != check for step in full[2:-1] for item in step)
            await asyncio.gather(*clients)
            assert (await checks_done(router)).checked == 3

    run(test)


def test_beside_clients_a_check_reads_its_prompt_in_small_pieces() -> None:
    target = ScriptedTarget(delay_s=0.001)

    async def test() -> None:
        async with serving(target, ScriptedDrafter(), check_share=1.0, max_draft_tokens=3) as router:
            client = asyncio.create_task(ask(router, request(5, 200, 2)))
            await ask(router, request(60, 8, 1))
            first = len(target.messages)
            await until(lambda: router._checks.totals.checked == 1)
            assert not client.done()
            beside = [item for step in steps_since(target, first) for item in step if len(step) == 2]
            pieces = [len(item.committed) for item in beside if item.prompt_tokens == 60 or not item.sample]
            assert len(pieces) >= 14 and max(pieces) == 4
            await client

    run(test)


def test_a_check_that_would_fit_does_not_start_while_a_larger_request_waits() -> None:
    # A prompt of 52 tokens is 13 blocks, with one to grow by; the second sequence has one and may soon need two more.
    target = ScriptedTarget(delay_s=0.001, total_blocks=16)

    async def test() -> None:
        async with serving(target, ScriptedDrafter(), check_share=1.0) as router:
            small = asyncio.create_task(ask(router, request(2, 2, 3)))
            long = asyncio.create_task(ask(router, request(4, 36, 1)))
            large = asyncio.create_task(ask(router, request(52, 4, 2)))
            await small
            assert len(router._placement.waiting) == 1 and router._checks.totals.pending == 1
            while router._placement.waiting:
                assert not any(running.is_check for running in router._running())
                await asyncio.sleep(0)
            await asyncio.gather(long, large)
            assert (await checks_done(router)).checked == 3

    run(test)


def test_a_check_that_finds_no_room_in_time_is_dropped() -> None:
    target, drafter = ScriptedTarget(delay_s=0.005), ScriptedDrafter()

    async def test() -> OnlineCheckTotals:
        async with serving(
            target, drafter, check_share=1.0, max_running_sequences=2, check_timeout_s=0.03, max_draft_tokens=1
        ) as router:
            short = [request(5, 4, number) for number in range(3)]
            await ask_all(router, [*short, *(request(5, 60, number) for number in range(3, 7))])
            totals = await checks_done(router)
            await assert_nothing_is_left(router, target, drafter)
            return totals

    totals = run(test)
    assert totals.dropped >= 1
    assert totals.checked + totals.dropped == 7


def test_no_more_checks_wait_than_allowed() -> None:
    target = ScriptedTarget(delay_s=0.001)

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter(), check_share=1.0, check_max_pending=2) as router:
            await ask_all(router, [request(5, 10, number) for number in range(8)])
            return await checks_done(router)

    totals = run(test)
    # All eight end in one round: one check begins at once, two wait, and the others go.
    assert (totals.checked, totals.dropped) == (3, 5)


@pytest.mark.parametrize("trouble", [Trouble.DEATH, Trouble.ERROR])
def test_a_check_whose_target_fails_is_dropped_and_never_put_in_line(trouble: Trouble) -> None:
    target = ScriptedTarget(delay_s=0.001)

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter(), check_share=1.0) as router:
            await ask(router, request())
            await first_check_begins(router)
            target.troubles[target.steps + 1] = trouble
            totals = await checks_done(router)
            assert not router._placement.waiting
            return totals

    assert run(test) == OnlineCheckTotals(dropped=1)


@pytest.mark.parametrize("loop_turns", range(0, 40, 3))
def test_closing_the_router_drops_the_check_that_runs_and_those_that_wait(loop_turns: int) -> None:
    workers: list[ScriptedWorker] = [ScriptedTarget(), ScriptedDrafter()]

    async def test() -> OnlineCheckTotals:
        router = make_router(check_share=1.0)
        for worker in workers:
            await router.register(worker.registration, worker)
        await ask_all(router, [request(5, 10, number) for number in range(3)])
        await turns(loop_turns)
        await router.close()
        totals = await checks_done(router)
        assert not any(running.is_check for running in router._running())
        return totals

    totals = run(test)
    assert totals.checked + totals.dropped == 3


@pytest.mark.parametrize("loop_turns", range(0, 120, 8))
def test_clients_that_come_at_any_moment_of_a_check_leave_nothing_behind(loop_turns: int) -> None:
    target, drafter = ScriptedTarget(total_blocks=14, delay_s=0.0002), ScriptedDrafter(total_blocks=14)

    async def test() -> None:
        async with serving(target, drafter, check_share=1.0, prefill_chunk_tokens=4) as router:
            for number in range(0, 12, 3):
                await ask(router, request(9, 15, number))
                await turns(loop_turns)
                pair = [request(9, 15, number + 1), request(9, 15, number + 2)]
                assert [answer.tokens for answer in await ask_all(router, pair)] == list(map(plainly, pair))
            totals = await checks_done(router)
            assert (totals.checked, totals.mismatched) == (12, 0)
            await assert_nothing_is_left(router, target, drafter)

    run(test)
