"""Whatever the drafter does, the text is the target's own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import (
    Guess,
    ScriptedDrafter,
    ScriptedTarget,
    Trouble,
    never_right,
    sometimes_right,
    toy_next,
)
from tests.router.helpers import (
    ChangingLengths,
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
from workers.messages import FinishReason

guesses = st.sampled_from([toy_next, never_right, sometimes_right(30), sometimes_right(70), sometimes_right(95)])
troubles = st.dictionaries(st.integers(0, 12), st.sampled_from(Trouble), max_size=4)
shapes = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 24), st.sampled_from([None, 0, 1, 2, 9])), min_size=1, max_size=9
)


@given(
    guess=guesses,
    k=st.integers(0, 6),
    shapes=shapes,
    drafter_troubles=troubles,
    limits=st.fixed_dictionaries(
        {
            "prefill_chunk_tokens": st.sampled_from([3, 16, 512]),
            "max_batch_sequences": st.sampled_from([1, 2, 32]),
            "max_running_sequences": st.sampled_from([1, 3, 64]),
            "draft_ahead": st.booleans(),
            "fallback": st.sampled_from(["none", "prompt_lookup"]),
        }
    ),
    drafter_context=st.sampled_from([8, 30, 256]),
    blocks=st.sampled_from([24, 60, 4096]),
)
@settings(max_examples=60)
def test_the_text_is_that_of_plain_decoding_whatever_happens_to_the_drafter(
    guess: Guess,
    k: int,
    shapes: list[tuple[int, int, int | None]],
    drafter_troubles: dict[int, Trouble],
    limits: dict[str, int],
    drafter_context: int,
    blocks: int,
) -> None:
    asked = [
        request(length, max_tokens, number, max_draft_tokens=own_limit)
        for number, (length, max_tokens, own_limit) in enumerate(shapes)
    ]
    target = ScriptedTarget(total_blocks=blocks)
    drafter = ScriptedDrafter(
        guess, troubles=drafter_troubles, context_length=drafter_context, total_blocks=max(blocks // 2, 8)
    )

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=k, **limits) as router, supervised(router, drafter):
            answers = await ask_all(router, asked)
            for each, answer in zip(asked, answers, strict=True):
                assert answer.failure is None
                assert answer.tokens == plainly(each)
                assert answer.finish_reason is FinishReason.LENGTH
                assert answer.usage.committed_tokens == each.stop.max_tokens
            # A drafter that only seemed dead keeps what it holds until it is taken into service again.
            await until(lambda: "draft-0" in in_service(router))
            await assert_nothing_is_left(router, target, drafter)

    run(test)


@given(
    guess=guesses,
    k=st.integers(0, 6),
    shapes=shapes,
    target_troubles=st.dictionaries(st.integers(0, 12), st.sampled_from([Trouble.FORGET, Trouble.STALE]), max_size=4),
    chunk=st.sampled_from([3, 512]),
)
@settings(max_examples=50)
def test_a_target_that_forgets_or_answers_late_repeats_and_loses_no_token(
    guess: Guess, k: int, shapes: list[tuple[int, int, int | None]], target_troubles: dict[int, Trouble], chunk: int
) -> None:
    asked = [request(length, max_tokens, number) for number, (length, max_tokens, _) in enumerate(shapes)]
    target, drafter = ScriptedTarget(troubles=target_troubles), ScriptedDrafter(guess)

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=k, prefill_chunk_tokens=chunk) as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, target, drafter)

    run(test)


@pytest.mark.parametrize("room", range(1, 12))
def test_speculation_stops_where_the_drafters_context_does(room: int) -> None:
    asked = request(length=6, max_tokens=20)
    target, drafter = ScriptedTarget(), ScriptedDrafter(context_length=5 + room)

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=4) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            # The drafter reads at most its context, and its last draft needs no room.
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens <= room
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_the_last_position_of_the_targets_context_can_be_reached_with_drafts() -> None:
    asked = request(length=60, max_tokens=4)
    target, drafter = ScriptedTarget(context_length=64), ScriptedDrafter(context_length=64)

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=8) as router:
            assert (await ask(router, asked)).tokens == plainly(asked)

    run(test)


def test_a_request_may_switch_speculation_off_or_name_its_drafter() -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()
    other = ScriptedDrafter(worker_id="draft-1", name="other-draft")

    async def test() -> None:
        async with serving(target, drafter, other, max_draft_tokens=3) as router:
            off = await ask(router, request(number=1, enabled=False))
            named = await ask(router, request(number=2, drafter="other-draft"))
            unknown = await ask(router, request(number=3, drafter="nobody"))

            assert (off.usage.draft_tokens, off.usage.drafter, off.usage.fallback_rounds) == (0, None, 0)
            assert named.usage.drafter == "other-draft"
            assert named.usage.draft_tokens > 0
            assert (unknown.usage.draft_tokens, unknown.usage.drafter) == (0, None)
            assert unknown.usage.fallback_rounds == unknown.usage.verifications - 1
            assert drafter.steps == 0
            for number, answer in enumerate([off, named, unknown], start=1):
                assert answer.tokens == plainly(request(number=number))

    run(test)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    guess=guesses,
    shapes=shapes,
    cohorts=st.integers(1, 4),
    draft_ahead=st.booleans(),
    drafter_context=st.sampled_from([30, 256]),
)
@settings(max_examples=50)
def test_a_draft_length_that_changes_every_round_changes_no_token(
    lengths: list[int],
    guess: Guess,
    shapes: list[tuple[int, int, int | None]],
    cohorts: int,
    draft_ahead: bool,
    drafter_context: int,
) -> None:
    asked = [request(length, max_tokens, number) for number, (length, max_tokens, _) in enumerate(shapes)]
    target, drafter = ScriptedTarget(), ScriptedDrafter(guess, context_length=drafter_context)

    async def test() -> None:
        policy = ChangingLengths(lengths)
        async with serving(target, drafter, policy=policy, max_cohorts=cohorts, draft_ahead=draft_ahead) as router:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, target, drafter)

    run(test)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("trouble", [Trouble.FORGET, Trouble.STALE])
def test_a_drafter_in_trouble_costs_the_drafts_of_one_round_and_no_more(step: int, trouble: Trouble) -> None:
    asked = request(max_tokens=25)
    target, drafter = ScriptedTarget(), ScriptedDrafter(troubles={step: trouble})

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=4) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            lost = 0 if (step, trouble) == (0, Trouble.FORGET) else 4  # it has nothing to forget at first
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens
            assert answer.usage.verifications == (25 + lost + 4) // 5

    run(test)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("trouble", [Trouble.FORGET, Trouble.STALE])
def test_a_target_in_trouble_costs_one_round_whose_drafts_are_made_again(step: int, trouble: Trouble) -> None:
    asked = request(max_tokens=25)
    target, drafter = ScriptedTarget(troubles={step: trouble}), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=4) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            assert answer.usage.draft_tokens == answer.usage.accepted_tokens == 20
            assert answer.usage.verifications == 5

    run(test)
