"""Requests that end their workers: each is found out and stopped alone, and those beside it get their text."""

import pytest

from tests.fakes import Poison, ScriptedDrafter, ScriptedTarget, Trouble, sometimes_right
from tests.router.helpers import (
    ask,
    ask_all,
    assert_nothing_is_left,
    in_service,
    plainly,
    request,
    run,
    serving,
    supervised,
    until,
)
from workers.errors import LinkError
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.suspicion import StepsUnderWay, Suspect, Suspicion
from workers.router.turns import ALONE, Turns

CULPRIT = 2
ASKED = [request(max_tokens=25, number=number) for number in range(5)]
POISON = int(ASKED[CULPRIT].prompt[0])
INNOCENT = [number for number in range(len(ASKED)) if number != CULPRIT]


@pytest.mark.parametrize("trouble", [Trouble.DEATH, Trouble.ERROR, Trouble.TIMEOUT])
@pytest.mark.parametrize(("position", "k", "targets"), [(0, 3, 1), (20, 4, 2)])
def test_a_request_that_ends_its_targets_fails_alone_after_two_resumptions(
    trouble: Trouble, position: int, k: int, targets: int
) -> None:
    poison = Poison(POISON, position, trouble)
    workers = [ScriptedTarget(f"target-{number}", poison=poison) for number in range(targets)]
    drafter = ScriptedDrafter(sometimes_right(60))

    async def test() -> None:
        limits = {"max_draft_tokens": k, "max_cohorts": 2}
        async with serving(*workers, drafter, **limits) as router, supervised(router, *workers, drafter):
            answers = await ask_all(router, ASKED)
            culprit = answers[CULPRIT]
            assert culprit.failure is not None
            assert (culprit.failure.status, culprit.failure.code) == (500, "poison_request")
            assert "3 targets in a row failed" in culprit.failure.message
            assert culprit.tokens == plainly(ASKED[CULPRIT], 25)[: len(culprit.tokens)]
            assert [answers[each].failure for each in INNOCENT] == [None] * 4
            assert [answers[each].tokens for each in INNOCENT] == [plainly(ASKED[each]) for each in INNOCENT]
            sizes = [size for worker in workers for size in worker.poisonings]
            assert len(sizes) == 3 and 1 in sizes
            # It does no harm to those that come later.
            assert (await ask(router, request(number=9))).tokens == plainly(request(number=9))
            await until(lambda: len(in_service(router)) == targets + 1)
            await assert_nothing_is_left(router, *workers, drafter)

    run(test)


@pytest.mark.parametrize("draft_ahead", [False, True])
@pytest.mark.parametrize(("position", "trouble"), [(0, Trouble.DEATH), (12, Trouble.TIMEOUT)])
def test_a_request_that_ends_its_drafters_goes_on_without_and_the_others_keep_theirs(
    position: int, trouble: Trouble, draft_ahead: bool
) -> None:
    target = ScriptedTarget(delay_s=0.0005)
    drafter = ScriptedDrafter(sometimes_right(60), poison=Poison(POISON, position, trouble))
    asked = [request(max_tokens=80, number=number) for number in range(5)]

    async def test() -> None:
        limits = {"max_draft_tokens": 3, "draft_ahead": draft_ahead, "fallback": "prompt_lookup"}
        async with serving(target, drafter, **limits) as router, supervised(router, drafter):
            answers = await ask_all(router, asked)
            assert [answer.failure for answer in answers] == [None] * 5
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            assert 1 <= len(drafter.poisonings) <= 3
            own, others = answers[CULPRIT].usage, [answers[each].usage for each in INNOCENT]
            assert own.fallback_rounds > max(each.fallback_rounds for each in others)
            assert min(each.draft_tokens for each in others) > 30
            await until(lambda: "draft-0" in in_service(router))
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_in_company_nothing_is_ever_proven_and_alone_the_third_time_is() -> None:
    one, other = Suspicion(), Suspicion()
    for _ in range(5):
        fail([one, other])
    assert one.is_isolated and other.is_isolated
    assert not one.is_proven and not other.is_proven
    fail([one])
    assert one.is_proven and not other.is_proven


def test_a_sequence_is_cleared_when_it_was_read_as_far_as_the_step_that_failed() -> None:
    suspicion = Suspicion()
    fail([suspicion], reach=12)
    fail([suspicion], reach=9)
    suspicion.read(11)
    assert suspicion.is_isolated
    suspicion.read(12)
    assert suspicion == Suspicion()


def test_a_sequence_in_two_steps_of_a_worker_gets_one_strike_and_an_answered_step_none() -> None:
    suspicion, answered = Suspicion(), Suspicion()
    steps = StepsUnderWay()
    with steps.step([Suspect(answered, 1)]):
        pass
    with pytest.raises(LinkError), steps.step([Suspect(suspicion, 5)]), steps.step([Suspect(suspicion, 7)]):
        raise LinkError("gone")
    steps.blame()
    assert (suspicion.strikes, suspicion.reach, answered.strikes, steps.outlived) == (1, 7, 0, 1)
    assert not steps


def test_rounds_of_those_that_have_to_be_alone_take_turns_with_all_others() -> None:
    turns, running = Turns(max_batch_sequences=8), {number: a_running_sequence(number) for number in range(4)}
    for number in (1, 2):
        fail([running[number].sequence.target.suspicion], times=2)
    cohorts = {0: 0, 1: 0, 2: 0, 3: 1}

    def begin() -> dict[int, list[int]]:
        rounds = turns.next_rounds(running, cohorts)
        return {number: [each.sequence.sequence_id for each in members] for number, members in rounds.items()}

    assert begin() == {ALONE: [1]}
    assert begin() == {}  # nothing beside it
    turns.ended(ALONE)
    assert begin() == {0: [0], 1: [3]}
    turns.ended(1)
    assert begin() == {}  # the other cohort has to end first
    turns.ended(0)
    assert begin() == {ALONE: [2]}


def fail(suspicions: list[Suspicion], reach: int = 1, times: int = 1) -> None:
    """Let a worker fail over a step of them."""
    for _ in range(times):
        steps = StepsUnderWay()
        with pytest.raises(LinkError), steps.step([Suspect(each, reach) for each in suspicions]):
            raise LinkError("gone")
        steps.blame()


def a_running_sequence(number: int) -> RunningSequence:
    def no_detokenizer(_: object) -> None:
        raise AssertionError("no text is looked at")

    return RunningSequence(Sequence(number, request(number=number), no_detokenizer), deadline_s=1e9)  # type: ignore[arg-type]
