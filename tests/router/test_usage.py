"""What a request's usage and the router's totals count."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import ScriptedDrafter, ScriptedTarget, never_right, sometimes_right
from tests.router.helpers import Answer, ask, ask_all, plainly, request, run, serving
from workers.messages import FinishReason, GenerationRequest, RoundTotals


@pytest.mark.parametrize("k", [1, 4])
def test_a_drafter_with_the_targets_own_weights_is_always_accepted(k: int) -> None:
    async def test() -> Answer:
        async with serving(ScriptedTarget(), ScriptedDrafter(), max_draft_tokens=k) as router:
            return await ask(router, request(max_tokens=64))

    usage = run(test).usage

    assert usage.draft_tokens == usage.accepted_tokens > 0
    assert usage.verifications == math.ceil(64 / (k + 1))
    assert usage.accepted_per_position[0] >= usage.verifications - 1
    assert usage.drafter == "toy-draft"
    assert usage.fallback_rounds == 0


@pytest.mark.parametrize("k", range(1, 7))
def test_a_drafter_that_is_never_right_costs_rounds_and_counts_nothing_as_accepted(k: int) -> None:
    async def test() -> Answer:
        async with serving(ScriptedTarget(), ScriptedDrafter(never_right), max_draft_tokens=k) as router:
            return await ask(router, request(max_tokens=13))

    usage = run(test).usage

    assert usage.accepted_tokens == 0
    assert usage.accepted_per_position == (0,) * k
    assert usage.verifications == usage.committed_tokens == 13
    assert usage.draft_tokens == sum(min(k, remaining - 1) for remaining in range(13, 0, -1))


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_a_block_that_crosses_max_tokens_delivers_exactly_max_tokens(max_tokens: int) -> None:
    asked = request(max_tokens=max_tokens)

    async def test() -> tuple[Answer, RoundTotals]:
        async with serving(ScriptedTarget(), ScriptedDrafter(), max_draft_tokens=5) as router:
            return await ask(router, asked), (await router.status()).totals

    answer, totals = run(test)

    assert answer.tokens == plainly(asked)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.committed_tokens == totals.committed_tokens == max_tokens
    assert answer.usage.draft_tokens == answer.usage.accepted_tokens == max_tokens - answer.usage.verifications


@given(
    percent=st.integers(0, 100),
    k=st.integers(0, 6),
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5),
    end_token=st.integers(15, 31),
)
@settings(max_examples=50)
def test_counts_agree_with_each_other_and_with_the_totals(
    percent: int, k: int, shapes: list[tuple[int, int]], end_token: int
) -> None:
    asked = [
        request(length, max_tokens, number, end_token_ids=frozenset({end_token}))
        for number, (length, max_tokens) in enumerate(shapes)
    ]

    async def test() -> tuple[list[Answer], RoundTotals]:
        drafter = ScriptedDrafter(sometimes_right(percent))
        async with serving(ScriptedTarget(), drafter, max_draft_tokens=k) as router:
            return await ask_all(router, asked), (await router.status()).totals

    answers, totals = run(test)

    for each, answer in zip(asked, answers, strict=True):
        usage = answer.usage
        assert usage.committed_tokens == len(answer.tokens) == len(expected(each, end_token))
        assert usage.verifications == len(answer.chunks)
        assert (
            usage.accepted_tokens == sum(usage.accepted_per_position) <= usage.draft_tokens <= usage.verifications * k
        )
        assert list(usage.accepted_per_position) == sorted(usage.accepted_per_position, reverse=True)
        # Every verification gives one token of the target's own, unless an end cut it off.
        own_tokens = usage.committed_tokens - usage.accepted_tokens
        assert usage.verifications - 1 <= own_tokens <= usage.verifications
    for count in ("verifications", "draft_tokens", "accepted_tokens", "committed_tokens"):
        assert getattr(totals, count) == sum(getattr(answer.usage, count) for answer in answers)


def expected(asked: GenerationRequest, end_token: int) -> list[int]:
    """The plain continuation up to and including the end token."""
    tokens = plainly(asked)
    return tokens[: tokens.index(end_token) + 1] if end_token in tokens else tokens


def test_totals_are_zero_and_finite_before_any_request() -> None:
    async def test() -> RoundTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter()) as router:
            return (await router.status()).totals

    assert set(dataclasses.astuple(run(test))) == {0}


def test_times_of_rounds_are_finite_and_the_wait_holds_what_was_waited_for() -> None:
    async def test() -> RoundTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter()) as router:
            await ask(router, request(max_tokens=20))
            return (await router.status()).totals

    totals = run(test)

    assert totals.rounds == totals.verify_compute_ms > 0  # the fakes say that each step computed for 1 ms
    assert 0 < totals.draft_wait_ms + totals.verify_wait_ms <= totals.wall_ms < math.inf


def test_rounds_that_wanted_drafts_and_had_no_drafter_are_counted() -> None:
    async def test() -> Answer:
        async with serving(ScriptedTarget(), max_draft_tokens=4) as router:
            return await ask(router, request(max_tokens=10))

    usage = run(test).usage

    assert (usage.verifications, usage.draft_tokens, usage.drafter) == (10, 0, None)
    assert usage.fallback_rounds == 9  # the last round has no token left to draft for
