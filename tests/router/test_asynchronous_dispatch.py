"""Several cohorts of one target under way at a time, and drafts that nobody waits for."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.fakes import HoldingLink, ScriptedDrafter, ScriptedTarget, SlowReadingLink
from tests.router.helpers import (
    ChangingLengths,
    ask,
    ask_all,
    assert_nothing_is_left,
    plainly,
    request,
    run,
    serving,
    until,
)
from workers.messages import ProposeRequest, VerifyRequest
from workers.router.ahead import LEAST_STEPS
from workers.router.draft_length import DraftCandidate, DraftPlan, LaneView, draft_length_policy


def test_while_one_cohort_is_verified_the_other_is_drafted_for_and_waits_at_the_target() -> None:
    asked = [request(max_tokens=30, number=number) for number in range(4)]

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter()
        link = HoldingLink(target, held_step=6)
        async with serving(drafter, max_cohorts=2, policy=ChangingLengths([3])) as router:
            await router.register(target.registration, link)
            answers = asyncio.create_task(ask_all(router, asked))
            await link.holding.wait()
            sent = [message for message in target.messages if isinstance(message, VerifyRequest)]
            held = {item.sequence_id for item in sent[6].items}
            await until(lambda: target.steps > 7)
            queued = [message for message in target.messages if isinstance(message, VerifyRequest)][7]
            assert held and not held & {item.sequence_id for item in queued.items}
            assert len(held) + len(queued.items) == 4
            assert all(len(item.proposal) for item in queued.items)
            link.release.set()
            assert [answer.tokens for answer in await answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_drafter_reads_a_long_prompt_while_the_target_goes_on() -> None:
    asked = request(length=100, max_tokens=40)

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter()
        async with serving(target, drafter, max_draft_tokens=4, prefill_chunk_tokens=40) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens > 20
            reads = [item for each in drafter.messages if isinstance(each, ProposeRequest) for item in each.items]
            assert max(len(item.committed) for item in reads if not item.draft_tokens) == 40
            assert all(len(item.committed) <= 32 for item in reads if item.draft_tokens)

    run(test)


@pytest.mark.parametrize("shared", [False, True])
def test_drafts_do_not_wait_behind_a_prompt_unless_target_and_drafter_share_a_device(shared: bool) -> None:
    short, long = request(max_tokens=200, number=0), request(length=100, number=1)

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter()
        async with serving(target, drafter, max_draft_tokens=4, max_cohorts=1) as router:
            drafted_for = asyncio.create_task(ask(router, short))
            await until(lambda: target.steps > 4)
            if shared:
                for _ in range(LEAST_STEPS):
                    router._lanes["target-0"]._planner.times.ahead.slowdown.observe(2.0)
            assert (await ask(router, long)).tokens == plainly(long)
            assert (await drafted_for).tokens == plainly(short)
        asked = [message for message in drafter.messages if isinstance(message, ProposeRequest)]
        drafts = [each for each in asked if any(item.draft_tokens for item in each.items)]
        first_read = next(each for each in asked[2:] if each not in drafts)
        reader = first_read.items[0].sequence_id
        verified = [message for message in target.messages if isinstance(message, VerifyRequest)]
        together = next(each for each in verified if reader in {item.sequence_id for item in each.items})
        [epoch] = [item.epoch for item in together.items if item.sequence_id != reader]
        of_that_round = next(each for each in drafts if each.items[0].epoch == epoch)
        assert (asked.index(first_read) < asked.index(of_that_round)) is shared

    run(test)


def test_late_drafts_are_left_out_and_their_drafter_drafts_again_when_it_has_answered() -> None:
    asked = request(max_tokens=120)

    async def test() -> None:
        target, drafter = ScriptedTarget(delay_s=0.002), ScriptedDrafter()
        async with serving(target, drafter, max_draft_tokens=4) as router:
            task = asyncio.create_task(ask(router, asked))
            await until(lambda: target.steps > 4)
            drafter.delay_s = 0.15
            await until(lambda: any(running.sequence.drafter.is_reading for running in router._running()))
            drafter.delay_s = 0.0
            answer = await task
            totals = (await router.status()).totals
            assert answer.tokens == plainly(asked)
            assert totals.late_drafts >= 1
            assert "draft-0" in {peer.worker_id for peer in router._peers()}
            # Rounds without drafts, then rounds with drafts again.
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens
            assert 120 // 5 < answer.usage.verifications < 120
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_target_looks_drafts_up_for_those_without_a_drafter() -> None:
    asked = [request(max_tokens=40, number=number) for number in range(3)]

    async def test() -> None:
        target = ScriptedTarget()
        async with serving(target, max_draft_tokens=4, fallback="prompt_lookup") as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            usages = [answer.usage for answer in answers]
            totals = (await router.status()).totals
            assert totals.looked_up_tokens == sum(usage.draft_tokens for usage in usages) > 0
            assert all(usage.drafter is None and usage.fallback_rounds > 0 for usage in usages)
            off = await ask(router, request(max_tokens=40, number=1, enabled=False))
            assert (off.usage.draft_tokens, off.tokens) == (0, plainly(asked[1]))
            await assert_nothing_is_left(router, target)

    run(test)


def test_waiting_behind_prompts_that_a_drafter_reads_does_not_count_as_what_its_drafts_cost() -> None:
    long, short = request(length=200, number=0), request(max_tokens=200, number=1)
    later = request(max_tokens=120, number=2)

    async def test() -> None:
        target, drafter = ScriptedTarget(delay_s=0.002), ScriptedDrafter()
        limits = {"max_draft_tokens": 4, "max_cohorts": 1, "prefill_chunk_tokens": 40}
        async with serving(target, policy=draft_length_policy("goodput"), **limits) as router:
            await router.register(drafter.registration, SlowReadingLink(drafter, reading_s=0.04))
            drafted_for = asyncio.create_task(ask(router, short))
            await until(lambda: target.steps > 4)  # now it is known how fast drafts are
            assert (await ask(router, long)).tokens == plainly(long)
            assert (await drafted_for).tokens == plainly(short)
            answer = await ask(router, later)
            assert answer.tokens == plainly(later)
            assert answer.usage.draft_tokens > 60

    run(test)


class FailingPolicy:
    """A policy with a fault."""

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """See `DraftLengthPolicy.plan`."""
        raise ZeroDivisionError("a fault of the policy")

    def forget(self, sequence_id: int) -> None:
        """See `DraftLengthPolicy.forget`."""


def test_a_policy_with_a_fault_ends_requests_with_an_error_and_leaves_nobody_waiting() -> None:
    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter()
        async with serving(target, drafter, policy=FailingPolicy()) as router:
            for answer in await ask_all(router, [request(number=number) for number in range(3)]):
                assert answer.failure is not None
                assert (answer.failure.status, answer.failure.code) == (500, "internal_error")
            await assert_nothing_is_left(router, target, drafter)

    run(test)
