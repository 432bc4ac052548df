"""End tokens and stop strings inside a block: nothing behind them reaches a client or an account."""

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, sometimes_right
from tests.router.helpers import TOKENIZER, Answer, ask, assert_nothing_is_left, plainly, request, run, serving
from workers.messages import FinishReason, GenerationRequest


def text_of(tokens: list[int]) -> str:
    text: str = TOKENIZER.decode(tokens)
    return text


def answered(asked: GenerationRequest, k: int, percent: int = 100) -> Answer:
    target, drafter = ScriptedTarget(), ScriptedDrafter(sometimes_right(percent))

    async def test() -> Answer:
        async with serving(target, drafter, max_draft_tokens=k) as router:
            answer = await ask(router, asked)
            await assert_nothing_is_left(router, target, drafter)
            return answer

    return run(test)


def first_occurrences(tokens: list[int]) -> list[int]:
    """Positions of tokens that do not occur earlier."""
    return [index for index, token in enumerate(tokens) if token not in tokens[:index]]


@pytest.mark.parametrize("k", [0, 1, 5, 8])
@pytest.mark.parametrize("percent", [60, 100])
def test_an_end_token_inside_a_block_is_the_last_one_delivered_and_counted(k: int, percent: int) -> None:
    tokens = plainly(request())
    for index in first_occurrences(tokens):
        answer = answered(request(end_token_ids=frozenset({tokens[index]})), k, percent)

        assert answer.tokens == tokens[: index + 1]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.usage.committed_tokens == index + 1
        assert answer.usage.accepted_tokens <= index + 1


@pytest.mark.parametrize("k", [0, 1, 5, 8])
@pytest.mark.parametrize("percent", [60, 100])
def test_a_stop_string_across_tokens_and_blocks_is_never_shown(k: int, percent: int) -> None:
    tokens = plainly(request())
    text = text_of(tokens)
    for index in range(len(tokens) - 1):
        stop = text[index : index + 2]
        cut = text.find(stop)

        answer = answered(request(stop_strings=(stop,)), k, percent)

        assert answer.finish_reason is FinishReason.STOP
        assert answer.tokens == tokens[: cut + 2]
        assert answer.usage.committed_tokens == cut + 2
        assert answer.chunks[-1].visible_characters == cut
        limits = [chunk.visible_characters for chunk in answer.chunks]
        assert all(limit is not None and limit <= cut for limit in limits)


def test_a_stop_string_that_never_comes_changes_nothing_and_all_text_is_shown_at_the_end() -> None:
    asked = request(stop_strings=("never", text_of(plainly(request()))[-1] + "!"))

    answer = answered(asked, 5)

    assert answer.tokens == plainly(asked)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.chunks[-1].visible_characters is None
    assert answer.chunks[-2].visible_characters is not None
