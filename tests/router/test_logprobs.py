"""Log-probabilities on their way through the router: each position once and in order, whatever befalls a worker."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import Guess, ScriptedDrafter, ScriptedTarget, Trouble, never_right, sometimes_right, toy_logprobs
from tests.router.helpers import TOKENIZER, Answer, ask, ask_all, assert_nothing_is_left, plainly, request, run, serving
from workers.messages import FinishReason, GenerationRequest, StopConditions, TokenLogprobs

guesses = st.sampled_from([never_right, sometimes_right(60), sometimes_right(95)])
troubles = st.dictionaries(st.integers(0, 12), st.sampled_from([Trouble.FORGET, Trouble.STALE]), max_size=4)
asks = st.tuples(st.sampled_from([None, 0, 1, 3]), st.booleans())
shapes = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20), asks), min_size=1, max_size=6)


def numbers(pieces: list[TokenLogprobs]) -> tuple[list[float], list[list[int]], list[list[float]]]:
    return (
        [value for piece in pieces for value in piece.chosen.tolist()],
        [row for piece in pieces for row in piece.top_ids.tolist()],
        [row for piece in pieces for row in piece.top.tolist()],
    )


def assert_told_once(asked: GenerationRequest, answer: Answer) -> None:
    """The entries are those of the tokens that came, and of the prompt's from its second on if that was asked for."""
    prompt, tokens = asked.prompt.tolist(), answer.tokens
    of_prompt = [chunk.prompt_logprobs for chunk in answer.chunks if chunk.prompt_logprobs is not None]
    of_tokens = [chunk.logprobs for chunk in answer.chunks if chunk.logprobs is not None]
    if asked.logprobs is None:
        assert of_prompt == of_tokens == []
        return
    assert all(chunk.logprobs is not None for chunk in answer.chunks if len(chunk.token_ids))
    known = toy_logprobs([*prompt, *tokens], 1, asked.logprobs)
    assert numbers(of_tokens) == numbers([known[len(prompt) - 1 :]])
    assert numbers(of_prompt) == (numbers([known[: len(prompt) - 1]]) if asked.prompt_logprobs else ([], [], []))
    with_prompt = [bool(chunk.prompt_logprobs) for chunk in answer.chunks]
    assert not any(with_prompt[next((i + 1 for i, c in enumerate(answer.chunks) if len(c.token_ids)), 99) :])


def requests_of(shapes: list[tuple[int, int, tuple[int | None, bool]]]) -> list[GenerationRequest]:
    return [
        replace(request(length, max_tokens, number), logprobs=logprobs, prompt_logprobs=of_prompt)
        for number, (length, max_tokens, (logprobs, of_prompt)) in enumerate(shapes)
    ]


@given(guess=guesses, k=st.integers(0, 6), shapes=shapes, target_troubles=troubles, chunk=st.sampled_from([3, 8, 512]))
@settings(max_examples=60)
def test_every_token_has_its_log_probabilities_once_whatever_the_target_forgets(
    guess: Guess,
    k: int,
    shapes: list[tuple[int, int, tuple[int | None, bool]]],
    target_troubles: dict[int, Trouble],
    chunk: int,
) -> None:
    asked = requests_of(shapes)
    target, drafter = ScriptedTarget(troubles=target_troubles), ScriptedDrafter(guess)

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=k, prefill_chunk_tokens=chunk) as router:
            for each, answer in zip(asked, await ask_all(router, asked), strict=True):
                assert answer.failure is None
                assert answer.tokens == (plainly(each) if each.stop.max_tokens else [])
                assert answer.finish_reason is FinishReason.LENGTH
                assert_told_once(each, answer)
            await assert_nothing_is_left(router, target, drafter)

    run(test)


@given(
    step=st.integers(0, 10),
    trouble=st.sampled_from([Trouble.DEATH, Trouble.TIMEOUT, Trouble.ERROR]),
    shapes=shapes,
    chunk=st.sampled_from([3, 7]),
)
@settings(max_examples=50)
def test_a_target_that_dies_costs_and_doubles_no_entry(
    step: int, trouble: Trouble, shapes: list[tuple[int, int, tuple[int | None, bool]]], chunk: int
) -> None:
    asked = requests_of(shapes)
    first, second = ScriptedTarget(troubles={step: trouble}), ScriptedTarget("target-1")
    drafter = ScriptedDrafter(sometimes_right(60))

    async def test() -> None:
        async with serving(first, second, drafter, prefill_chunk_tokens=chunk) as router:
            for each, answer in zip(asked, await ask_all(router, asked), strict=True):
                assert_told_once(each, answer)
                assert len(answer.tokens) == each.stop.max_tokens
            await assert_nothing_is_left(router, second, drafter)

    run(test)


@pytest.mark.parametrize("k", [0, 1, 8])
def test_the_entries_of_a_block_are_cut_where_a_stop_cuts_the_block(k: int) -> None:
    plain = plainly(request(max_tokens=40))
    end = next(token for index, token in enumerate(plain) if index >= 2 and token not in plain[:index])
    letters = TOKENIZER.decode([end])
    by_token = StopConditions(40, frozenset({end}))
    by_string = StopConditions(40, stop_strings=(letters,))

    async def test() -> None:
        async with serving(ScriptedTarget(), ScriptedDrafter(), max_draft_tokens=k) as router:
            for stop in (by_token, by_string):
                asked = replace(request(), stop=stop, logprobs=2)
                answer = await ask(router, asked)
                assert answer.finish_reason is FinishReason.STOP
                assert answer.tokens == plain[: plain.index(end) + 1]
                assert_told_once(asked, answer)

    run(test)


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_a_prompt_may_be_scored_without_generating_anything(length: int) -> None:
    asked = replace(request(length, 0), logprobs=2, prompt_logprobs=True)
    target, drafter = ScriptedTarget(context_length=length), ScriptedDrafter()

    async def test() -> None:
        async with serving(target, drafter, prefill_chunk_tokens=3) as router:
            answer = await ask(router, asked)
            assert (answer.tokens, answer.finish_reason) == ([], FinishReason.LENGTH)
            assert_told_once(asked, answer)
            assert answer.usage.verifications == answer.usage.draft_tokens == drafter.steps == 0
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_an_impossible_token_is_minus_infinity_on_the_way() -> None:
    async def test() -> Answer:
        async with serving(ScriptedTarget()) as router:
            return await ask(router, replace(request(max_tokens=3), logprobs=2))

    tops = [chunk.logprobs.top for chunk in run(test).chunks if chunk.logprobs is not None]
    assert np.isneginf(np.concatenate(tops)[:, 0]).all()
