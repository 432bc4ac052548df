import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.generation import ChoiceDelta
from deployments.openai_responses import (
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    FinishedChoice,
    UsageTally,
    speculation_report,
)
from deployments.visible_text import TextDelta
from workers.messages import FinishReason, SpeculationUsage, token_ids

HEAD = AnswerHead("x-1", "tiny")
SEEDS = (7, 2**53 - 1)
CHOICES = [FinishedChoice("one", [], FinishReason.STOP), FinishedChoice("two", [], FinishReason.LENGTH)]


def test_speculation_of_several_choices_is_summed() -> None:
    first = SpeculationUsage(3, 12, 7, 10, (3, 2, 2), "tiny", 1)
    second = SpeculationUsage(4, 8, 5, 9, (4, 1), None, 0)
    assert speculation_report([first, second]) == {
        "verifications": 7,
        "draft_tokens": 20,
        "accepted_tokens": 12,
        "accepted_length": round(19 / 7, 4),
        "accepted_per_position": [7, 3, 2],
        "drafter": "tiny",
        "fallback_rounds": 1,
    }


@pytest.mark.parametrize("usages", [[], [SpeculationUsage()]])
def test_without_verifications_the_accepted_length_is_zero(usages: list[SpeculationUsage]) -> None:
    assert speculation_report(usages)["accepted_length"] == 0.0


def test_answers_are_what_the_openai_package_expects() -> None:
    usage = UsageTally(prompt_tokens=3, completion_tokens=2).total()
    completion = Completion.model_validate(CompletionFormat(HEAD, SEEDS).answer(CHOICES, usage), strict=True)
    assert [choice.text for choice in completion.choices] == ["one", "two"]
    assert completion.usage is not None and completion.usage.total_tokens == 5
    chat = ChatCompletion.model_validate(ChatFormat(HEAD, SEEDS[:1]).answer(CHOICES[:1], usage), strict=True)
    assert chat.choices[0].message.content == "one"


def test_chunks_are_what_the_openai_package_expects() -> None:
    last = ChoiceDelta(0, TextDelta("x", token_ids([1]), FinishReason.STOP, SpeculationUsage()))
    form = ChatFormat(HEAD, SEEDS[:1])
    choices = form.opening() + form.chunks(last)
    chunks = [
        ChatCompletionChunk.model_validate(HEAD.part(form.chunk_kind, [choice]), strict=True) for choice in choices
    ]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "x", None]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_extra == {"seed": 7}


def test_a_round_that_shows_nothing_makes_no_chunk() -> None:
    silent = ChoiceDelta(0, TextDelta("", token_ids([1])))
    assert CompletionFormat(HEAD, SEEDS).chunks(silent) == []
    assert ChatFormat(HEAD, SEEDS).chunks(silent) == []


def test_cached_tokens_are_summed_over_prompts_and_are_the_least_of_the_choices_of_each() -> None:
    tally = UsageTally(prompt_tokens=30, choices_per_prompt=2)
    for index, cached in enumerate([16, 0, 8, 12]):
        usage = SpeculationUsage(cached_prompt_tokens=cached)
        tally.add(ChoiceDelta(index, TextDelta("", token_ids([1]), FinishReason.STOP, usage)))
    total = tally.total()
    assert total["prompt_tokens_details"] == {"cached_tokens": 8}
    assert (total["completion_tokens"], total["total_tokens"]) == (4, 34)
