"""The online check: what it finds, whom it never delays, and what it leaves behind."""

import asyncio
import logging
from dataclasses import replace

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, ScriptedWorker, SwayedTarget, Trouble, sometimes_right
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
    until,
)
from workers.messages import (
    GenerationRequest,
    LogitRules,
    OnlineCheckTotals,
    RoundTotals,
    SpeculationUsage,
    Verification,
    VerifyRequest,
)
from workers.router.online_check import is_chosen, is_comparable
from workers.router.router import Router

COUNTS = ("verifications", "draft_tokens", "accepted_tokens", "committed_tokens")


async def checks_done(router: Router) -> OnlineCheckTotals:
    """The totals once no check waits or runs."""
    await until(lambda: router._checks.totals.pending == 0)
    return router._checks.totals


async def first_check_begins(router: Router) -> None:
    await until(lambda: any(running.is_check for running in router._running()))


def cold(number: int = 0, max_tokens: int = 20, temperature: float = 0.0, **options: object) -> GenerationRequest:
    """A request at another temperature than 1, which the toy model does not heed."""
    asked = request(max_tokens=max_tokens, number=number, **options)  # type: ignore[arg-type]
    return replace(asked, sampling=replace(asked.sampling, temperature=temperature))


@pytest.mark.parametrize("percent", [0, 60, 100])
def test_answers_that_drafts_did_not_change_are_checked_and_equal(percent: int) -> None:
    asked = [request(1 + number, 12, number) for number in range(10)]
    target, drafter = ScriptedTarget(), ScriptedDrafter(sometimes_right(percent))

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0) as router:
            assert [answer.tokens for answer in await ask_all(router, asked)] == list(map(plainly, asked))
            totals = await checks_done(router)
            await assert_nothing_is_left(router, target, drafter)
            return totals

    assert run(test) == OnlineCheckTotals(checked=10, compared_tokens=120)


def test_answers_that_stopped_early_are_checked_to_their_end_and_no_further() -> None:
    end = plainly(request())[6]
    asked = request(end_token_ids=frozenset({end}))

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=1.0) as router:
            answer = await ask(router, asked)
            assert len(answer.tokens) < asked.stop.max_tokens
            totals = await checks_done(router)
            assert totals.compared_tokens == len(answer.tokens)
            return totals

    assert run(test).checked == 1


def test_an_answer_that_drafts_changed_is_reported_with_its_place_and_both_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = request(number=3, max_tokens=30)
    asked = replace(asked, sampling=replace(asked.sampling, rules=LogitRules(presence_penalty=0.5)))
    workers = SwayedTarget(sways_at=15), ScriptedDrafter(trusting=True)

    async def test() -> tuple[Answer, OnlineCheckTotals]:
        async with serving(*workers, check_share=1.0) as router:
            answer = await ask(router, asked)
            totals = await checks_done(router)
            await assert_nothing_is_left(router, *workers)
            return answer, totals

    with caplog.at_level(logging.ERROR):
        answer, totals = run(test)
    right = plainly(asked)
    place = next(index for index, token in enumerate(answer.tokens) if token != right[index])
    assert totals == OnlineCheckTotals(checked=1, mismatched=1, compared_tokens=place + 1)
    (record,) = caplog.records
    line = record.getMessage()
    assert f"request request-3 differs at token {place} of its answer" in line
    assert f"id {answer.tokens[place]} with drafts, id {right[place]} without" in line
    assert "seed=3" in line and "presence_penalty=0.5" in line
    assert "\n" not in line and str(asked.prompt.tolist()) not in line


def test_an_answer_that_drafts_ended_too_early_differs_at_its_last_token() -> None:
    asked = request(number=4, max_tokens=30)
    wrong_place, wrong_token = 9, 25  # what a target that sways at position 10 answers; the assertions below say so

    async def test() -> OnlineCheckTotals:
        async with serving(SwayedTarget(sways_at=10), ScriptedDrafter(trusting=True), check_share=1.0) as router:
            stopped = replace(asked, stop=replace(asked.stop, end_token_ids=frozenset({wrong_token})))
            tokens = (await ask(router, stopped)).tokens
            assert tokens[:-1] == plainly(asked)[:wrong_place] and tokens[-1] == wrong_token
            return await checks_done(router)

    assert run(test) == OnlineCheckTotals(checked=1, mismatched=1, compared_tokens=10)


def test_nothing_is_checked_without_a_share() -> None:
    target = ScriptedTarget()

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter()) as router:
            await ask_all(router, [request(number=number) for number in range(5)])
            await turns(50)
            return (await router.status()).online_check

    assert run(test) == OnlineCheckTotals()


def test_half_a_share_checks_about_half_and_always_the_same() -> None:
    asked = [request(4, 6, number) for number in range(60)]
    expected = sum(is_chosen(each.request_id, 0.5) for each in asked)

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=0.5, check_max_pending=60) as router:
            await ask_all(router, asked)
            return await checks_done(router)

    assert run(test).checked == run(test).checked == expected
    assert 20 <= expected <= 40


def test_the_choice_depends_on_the_id_alone_and_grows_with_the_share() -> None:
    ids = [f"cmpl-{number}-0" for number in range(4000)]
    tenth = {each for each in ids if is_chosen(each, 0.1)}
    assert 320 <= len(tenth) <= 480
    assert tenth <= {each for each in ids if is_chosen(each, 0.3)}
    assert all(is_chosen(each, 1.0) and not is_chosen(each, 0.0) for each in ids)


@pytest.mark.parametrize(
    ("asked", "draft_tokens", "deployment", "comparable"),
    [
        (cold(temperature=0.8), 4, Verification.COUPLED, True),
        (cold(temperature=0.8), 0, Verification.COUPLED, False),
        (cold(temperature=0.8), 4, Verification.RATIO, False),
        (cold(temperature=0.0), 4, Verification.RATIO, True),
        (cold(temperature=0.8, verification=Verification.RATIO), 4, Verification.COUPLED, False),
        (cold(temperature=0.8, verification=Verification.COUPLED), 4, Verification.RATIO, True),
    ],
)
def test_ids_are_compared_where_they_must_be_equal(
    asked: GenerationRequest, draft_tokens: int, deployment: Verification, comparable: bool
) -> None:
    assert is_comparable(asked, SpeculationUsage(draft_tokens=draft_tokens), deployment) is comparable


def test_requests_with_nothing_to_compare_are_skipped() -> None:
    asked = [
        cold(0, temperature=0.8, verification=Verification.RATIO),
        cold(1, enabled=False),
        cold(2, verification=Verification.RATIO),
    ]

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=1.0) as router:
            await ask_all(router, asked)
            return await checks_done(router)

    assert run(test) == OnlineCheckTotals(checked=1, skipped=2, compared_tokens=20)


def test_requests_that_were_cancelled_or_failed_are_not_checked() -> None:
    target = ScriptedTarget()
    target.faulty_first_token = int(request(number=1).prompt[0])

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter(), check_share=1.0) as router:
            assert (await ask(router, request(number=1))).failure is not None
            task = asyncio.create_task(ask(router, request(max_tokens=100)))
            await turns(20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await turns(20)
            return router._checks.totals

    assert run(test) == OnlineCheckTotals()


def test_usage_and_totals_of_clients_are_what_they_are_without_checks() -> None:
    asked = [request(5, 20, number) for number in range(6)]

    async def test(share: float) -> tuple[list[SpeculationUsage], RoundTotals]:
        async with serving(ScriptedTarget(), ScriptedDrafter(sometimes_right(50)), check_share=share) as router:
            # One after the other, with the checks between them: rounds that serve only a check must not count.
            usages = []
            for each in asked:
                usages.append((await ask(router, each)).usage)
                await checks_done(router)
            status = await router.status()
            assert status.running == 0
            assert status.online_check.checked == (6 if share else 0)
            return usages, status.totals

    with_checks, without = run(lambda: test(1.0)), run(lambda: test(0.0))
    assert with_checks[0] == without[0]
    assert with_checks[1].rounds == without[1].rounds
    assert with_checks[1].verify_compute_ms == without[1].verify_compute_ms
    for count in COUNTS:
        assert getattr(with_checks[1], count) == getattr(without[1], count)


def test_clients_that_need_the_row_of_a_check_get_it_at_once_and_the_check_is_made_later() -> None:
    target, drafter = ScriptedTarget(delay_s=0.002), ScriptedDrafter()

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0, max_running_sequences=1) as router:
            await ask(router, request(number=1))
            await first_check_begins(router)
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
    # 5 + 20 tokens are 7 blocks.
    target, drafter = ScriptedTarget(delay_s=0.002, total_blocks=10), ScriptedDrafter()

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0) as router:
            await ask(router, request(number=1))
            await first_check_begins(router)
            assert (await ask(router, request(number=2))).tokens == plainly(request(number=2))
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
                assert not (router._waiting and any(running.is_check for running in router._running()))
            assert [task.result().tokens for task in tasks] == list(map(plainly, asked))
            return await checks_done(router)

    assert run(test).checked == 12


def test_a_check_takes_no_row_of_a_full_batch_and_few_tokens_beside_clients() -> None:
    target = ScriptedTarget(delay_s=0.001)

    async def test() -> None:
        limits = {"check_share": 1.0, "max_batch_sequences": 2, "max_draft_tokens": 3, "prefill_chunk_tokens": 100}
        async with serving(target, ScriptedDrafter(), **limits) as router:
            long = request(60, 12, 1)
            await ask(router, long)
            await first_check_begins(router)
            check = next(running.sequence.sequence_id for running in router._running())
            target.messages.clear()
            task = asyncio.create_task(ask(router, request(5, 100, 2)))
            await until(lambda: len(target.messages) > 8)
            pair = [asyncio.create_task(ask(router, request(5, 60, number))) for number in (3, 4)]
            await asyncio.gather(task, *pair)
            await checks_done(router)
            for step in (message for message in target.messages if isinstance(message, VerifyRequest)):
                assert len(step.items) <= 2
                beside = [item for item in step.items if item.sequence_id != check]
                ours = [item for item in step.items if item.sequence_id == check]
                if beside and ours:
                    assert len(ours[0].committed) <= 4

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
            assert not router._waiting
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


@pytest.mark.parametrize("loop_turns", range(0, 30, 2))
def test_clients_that_come_at_any_moment_of_a_check_leave_nothing_behind(loop_turns: int) -> None:
    target, drafter = ScriptedTarget(total_blocks=14), ScriptedDrafter(total_blocks=14)

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
