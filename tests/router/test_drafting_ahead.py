"""Drafting ahead: the drafter goes on while the target verifies, and a right guess saves its next step."""

import asyncio

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, never_right, sometimes_right
from tests.router.helpers import (
    Answer,
    ChangingLengths,
    ask,
    ask_all,
    assert_nothing_is_left,
    plainly,
    request,
    run,
    serving,
    turns,
)
from workers.errors import DeadlineExceededError
from workers.messages import (
    DraftAheadRequest,
    ProposeRequest,
    RoundTotals,
    SamplingParams,
    Verification,
    WorkerRequest,
    WorkerResponse,
)

K = 4


def drafting(*messages: WorkerRequest) -> list[ProposeRequest]:
    """Those that ask for drafts."""
    return [
        message
        for message in messages
        if isinstance(message, ProposeRequest) and any(item.draft_tokens for item in message.items)
    ]


async def answered(
    drafter: ScriptedDrafter, target: ScriptedTarget | None = None, sequences: int = 1, **limits: object
) -> tuple[list[Answer], RoundTotals]:
    """Answer requests, which must be as without drafts, with drafting ahead."""
    # Too few rounds for a drafter that is never right to be benched.
    asked = [request(max_tokens=20, number=number) for number in range(sequences)]
    target = target or ScriptedTarget()
    async with serving(target, drafter, max_draft_tokens=K, draft_ahead=True, **limits) as router:
        answers = await ask_all(router, asked)
        assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
        await assert_nothing_is_left(router, target, drafter)
        return answers, (await router.status()).totals


def test_a_drafter_that_is_right_is_asked_for_drafts_only_until_its_times_are_known() -> None:
    drafter = ScriptedDrafter()
    [answer], totals = run(lambda: answered(drafter))
    assert len(drafting(*drafter.messages)) <= 2
    assert totals.ahead_misses == 0
    assert totals.ahead_hits >= answer.usage.verifications - 3
    assert answer.usage.draft_tokens == answer.usage.accepted_tokens


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_drafter_that_knows_the_corrections_hits_though_its_drafts_are_rejected(sequences: int) -> None:
    drafter = ScriptedDrafter(sometimes_right(80))
    answers, totals = run(lambda: answered(drafter, sequences=sequences))
    assert sum(answer.usage.accepted_tokens for answer in answers) < sum(a.usage.draft_tokens for a in answers)
    # Of the outcomes of four drafts it drafts behind all but one.
    assert totals.ahead_hits > totals.ahead_misses


def test_a_miss_is_drafted_for_as_without_drafting_ahead() -> None:
    drafter = ScriptedDrafter(never_right)
    [answer], totals = run(lambda: answered(drafter))
    assert totals.ahead_hits == 0
    assert totals.ahead_misses > 0
    assert len(drafting(*drafter.messages)) == answer.usage.verifications - 1
    assert answer.usage.accepted_tokens == 0


def test_nothing_is_drafted_ahead_for_several_cohorts_for_a_shared_drafter_or_for_ratio_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There would be a single cohort until it is known whether target and drafter share a device.
    monkeypatch.setattr("workers.router.draft_planning.LONGEST_LEARNING", 0)

    def ahead(drafter: ScriptedDrafter) -> int:
        return sum(isinstance(message, DraftAheadRequest) for message in drafter.messages)

    async def test() -> None:
        cohorts = ScriptedDrafter()
        await answered(cohorts, sequences=4, max_cohorts=2, policy=ChangingLengths([K]))
        assert ahead(cohorts) == 0

        shared, targets = ScriptedDrafter(), [ScriptedTarget(f"target-{number}") for number in range(2)]
        async with serving(*targets, shared, draft_ahead=True) as router:
            await ask_all(router, [request(max_tokens=30, number=number) for number in range(2)])
        assert ahead(shared) == 0

        by_ratio, target = ScriptedDrafter(), ScriptedTarget()
        async with serving(target, by_ratio, draft_ahead=True, verification=Verification.RATIO) as router:
            await ask(router, request(max_tokens=30))
        assert ahead(by_ratio) == 0
        assert SamplingParams().temperature > 0

    run(test)


class SilentAheadLink:
    """A link whose worker takes what is drafted ahead and never answers."""

    def __init__(self, worker: ScriptedDrafter) -> None:
        self._worker = worker
        self.asked = 0

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        if isinstance(message, DraftAheadRequest):
            self.asked += 1
            await asyncio.sleep(deadline_s)
            raise DeadlineExceededError("no answer")
        return await self._worker.call(message, deadline_s)


def test_a_drafter_that_never_comes_back_from_drafting_ahead_stops_nobody() -> None:
    asked = request(max_tokens=40)

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter()
        link = SilentAheadLink(drafter)
        async with serving(target, max_draft_tokens=K, draft_ahead=True, propose_deadline_s=0.4) as router:
            await router.register(drafter.registration, link)
            assert (await ask(router, asked)).tokens == plainly(asked)
        assert link.asked > 0

    run(test)


class SlowAheadLink:
    """A link whose worker drafts ahead until it is told that it `may_answer`."""

    def __init__(self, worker: ScriptedDrafter) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self._worker = worker

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        answer = await self._worker.call(message, deadline_s)
        if isinstance(message, DraftAheadRequest):
            self.asked.set()
            await self.may_answer.wait()
        return answer


def test_a_client_that_leaves_while_its_drafter_drafts_ahead_harms_nobody() -> None:
    staying, leaving = request(max_tokens=40, number=1), request(max_tokens=40, number=2)

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter(never_right)
        link = SlowAheadLink(drafter)
        async with serving(target, max_draft_tokens=K, draft_ahead=True) as router:
            await router.register(drafter.registration, link)
            stays = asyncio.create_task(ask(router, staying))
            leaves = asyncio.create_task(ask(router, leaving))
            await link.asked.wait()
            # The verification has long been answered, and the next round waits for the drafter.
            await turns(20)
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            link.may_answer.set()
            answer = await stays
            assert (answer.failure, answer.tokens) == (None, plainly(staying))
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_drafter_that_lost_its_sequences_while_drafting_ahead_is_told_them_again() -> None:
    drafter = ScriptedDrafter()

    async def test() -> None:
        asked, target = request(max_tokens=60), ScriptedTarget(delay_s=0.001)
        async with serving(target, drafter, max_draft_tokens=K, draft_ahead=True) as router:
            task = asyncio.create_task(ask(router, asked))
            while not any(isinstance(message, DraftAheadRequest) for message in drafter.messages):
                await asyncio.sleep(0)
            drafter.held.clear()
            answer = await task
            assert answer.tokens == plainly(asked)
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens > 3 * K
            await assert_nothing_is_left(router, target, drafter)

    run(test)
