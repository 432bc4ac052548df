"""The router's side of prefix caching: it takes up where a worker says that its cache ends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import Guess, ScriptedDrafter, ScriptedTarget, Trouble, never_right, sometimes_right, toy_next
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
from workers.messages import ProposeRequest, VerifyItem, VerifyRequest

troubles = st.dictionaries(st.integers(0, 20), st.sampled_from(Trouble), max_size=4)


def items_of(worker: ScriptedTarget) -> list[VerifyItem]:
    return [item for message in worker.messages if isinstance(message, VerifyRequest) for item in message.items]


@given(
    guess=st.sampled_from([toy_next, never_right, sometimes_right(70)]),
    k=st.integers(0, 5),
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 24)), min_size=2, max_size=9),
    target_troubles=st.dictionaries(st.integers(0, 20), st.sampled_from([Trouble.FORGET, Trouble.STALE]), max_size=4),
    drafter_troubles=troubles,
    chunk=st.sampled_from([3, 16, 512]),
    drafter_context=st.sampled_from([30, 256]),
)
@settings(max_examples=50)
def test_the_text_is_that_of_plain_decoding_whatever_the_workers_have_cached_or_lost(
    guess: Guess,
    k: int,
    shapes: list[tuple[int, int]],
    target_troubles: dict[int, Trouble],
    drafter_troubles: dict[int, Trouble],
    chunk: int,
    drafter_context: int,
) -> None:
    asked = [request(length, max_tokens, number % 2) for number, (length, max_tokens) in enumerate(shapes)]
    target = ScriptedTarget(troubles=target_troubles, prefix_caching=True)
    drafter = ScriptedDrafter(guess, troubles=drafter_troubles, context_length=drafter_context, prefix_caching=True)

    async def test() -> None:
        async with (
            serving(target, drafter, max_draft_tokens=k, prefill_chunk_tokens=chunk) as router,
            supervised(router, drafter),
        ):
            for batch in (asked[::2], asked[1::2], asked):
                answers = await ask_all(router, batch)
                assert [answer.tokens for answer in answers] == [plainly(each) for each in batch]
            await until(lambda: "draft-0" in in_service(router))
            await assert_nothing_is_left(router, target, drafter)

    run(test)
    if max(length for length, _ in shapes) > 2 * target.block_tokens:
        assert target.prefix_hits > 0


@pytest.mark.parametrize(("chunk", "reads"), [(512, [(0, 33)]), (16, [(0, 16), (32, 1)])])
def test_a_prompt_that_is_cached_takes_one_message_or_two(chunk: int, reads: list[tuple[int, int]]) -> None:
    target, asked = ScriptedTarget(prefix_caching=True), request(33, 1)

    async def test() -> None:
        async with serving(target, prefill_chunk_tokens=chunk) as router:
            await ask(router, asked)
            target.messages.clear()
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)

    run(test)
    assert [(item.first_position, len(item.committed)) for item in items_of(target)] == reads
    first, *others = items_of(target)
    assert first.prompt is not None and len(first.prompt) == 33
    assert all(item.prompt is None for item in others)


def test_a_drafter_that_is_ahead_of_its_target_waits_for_it() -> None:
    target, drafter, asked = ScriptedTarget(delay_s=0.001), ScriptedDrafter(prefix_caching=True), request(33, 8)

    async def test() -> None:
        async with serving(target, drafter, prefill_chunk_tokens=4) as router:
            for _ in range(2):
                answer = await ask(router, asked)
                assert answer.tokens == plainly(asked)
                assert answer.usage.accepted_tokens == answer.usage.draft_tokens > 0

    run(test)
    items = [item for message in drafter.messages if isinstance(message, ProposeRequest) for item in message.items]
    second = items[[item.first_position for item in items].index(0, 1) :]
    # How far the target has come meanwhile, for which nobody waits, is a matter of time.
    assert (len(second[0].committed), second[1].first_position) == (4, 32)


def test_the_salt_goes_with_the_first_message_and_scored_prompts_are_not_looked_up() -> None:
    target, drafter = ScriptedTarget(), ScriptedDrafter()
    salted = replace(request(12, 4), cache_salt="tenant")
    scored = replace(request(12, 4), logprobs=0, prompt_logprobs=True)

    async def test() -> None:
        async with serving(target, drafter, prefill_chunk_tokens=8) as router:
            for each in (salted, scored):
                assert (await ask(router, each)).tokens == plainly(each)

    run(test)
    starts = [item for item in items_of(target) if item.first_position == 0]
    assert [(item.cache_salt, item.prompt is None) for item in starts] == [("tenant", False), (None, True)]
    assert {item.cache_salt for item in items_of(target) if item.first_position} == {None}


@pytest.mark.parametrize("chunk", [512, 16, 3])
def test_usage_says_how_much_of_the_prompt_was_cached_when_it_was_first_read(chunk: int) -> None:
    target, asked = ScriptedTarget(prefix_caching=True), request(33, 20)

    async def test() -> list[int]:
        async with serving(target, prefill_chunk_tokens=chunk) as router:
            asks = (asked, asked, replace(asked, logprobs=0, prompt_logprobs=True), request(17, 4))
            return [(await ask(router, each)).usage.cached_prompt_tokens for each in asks]

    # Whole blocks of 16 tokens, less than the prompt; a prompt that is scored has to be read.
    assert run(test) == [0, 32, 0, 16]


def test_what_is_found_after_a_restart_is_not_counted_as_cached() -> None:
    target, asked = ScriptedTarget(prefix_caching=True, troubles={3: Trouble.FORGET}), request(33, 20)

    async def test() -> int:
        async with serving(target, prefill_chunk_tokens=512) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            return answer.usage.cached_prompt_tokens

    assert run(test) == 0
    assert target.prefix_hits > 0
