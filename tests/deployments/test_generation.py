import asyncio
from collections.abc import Sequence

import pytest

from deployments import generation
from deployments.generation import ChoiceDelta, GenerationFailedError, generate_choices, generate_text
from deployments.text import TextCodec
from deployments.visible_text import TextDelta
from tests.fakes import ScriptedService, in_blocks
from tests.limits import HANG_S
from workers.errors import UnavailableError
from workers.messages import (
    FinishReason,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    SamplingParams,
    StopConditions,
    TokenChunk,
    token_ids,
)

MIXED = "日本🙂é x"


def request(name: str = "r", ends: frozenset[int] = frozenset({0})) -> GenerationRequest:
    return GenerationRequest(name, token_ids([5, 6]), SamplingParams(), StopConditions(100, ends), timeout_s=HANG_S)


def texts_of(codec: TextCodec, events: Sequence[GenerationEvent], asked: GenerationRequest | None = None) -> list[str]:
    asked = asked or request()
    service = ScriptedService(lambda _: events)

    async def run() -> list[str]:
        return [d.text async for d in generate_text(service, asked, codec)]

    return asyncio.run(run())


def chunks(
    codec: TextCodec, *pieces: tuple[str, int | None], reason: FinishReason = FinishReason.STOP
) -> list[TokenChunk]:
    ids = [codec.encode(text) for text, _ in pieces]
    last = len(pieces) - 1
    return [
        TokenChunk(ids[index], visible, reason if index == last else None) for index, (_, visible) in enumerate(pieces)
    ]


@pytest.mark.parametrize("block", range(1, 7))
def test_characters_split_over_tokens_appear_once_and_whole(codec: TextCodec, block: int) -> None:
    texts = texts_of(codec, in_blocks(codec.encode(MIXED).tolist(), block))
    assert "".join(texts) == MIXED
    assert not any("\ufffd" in text for text in texts)


def test_text_is_shown_only_as_far_as_the_router_allows(codec: TextCodec) -> None:
    assert texts_of(codec, chunks(codec, ("abc", 2), ("d", 3), ("STOP", 4))) == ["ab", "c", "d"]


def test_text_held_back_for_a_stop_that_did_not_come_is_shown_at_the_end(codec: TextCodec) -> None:
    assert texts_of(codec, chunks(codec, ("abc", 1), ("de", 1), ("", None))) == ["a", "", "bcde"]


def test_a_last_character_that_never_became_whole_is_shown_at_the_end(codec: TextCodec) -> None:
    ids = codec.encode("a日").tolist()[:-1]
    assert texts_of(codec, in_blocks(ids, 2)) == ["a", "\ufffd"]


def test_an_end_token_that_the_tokenizer_does_not_call_special_is_counted_but_not_shown(codec: TextCodec) -> None:
    end = int(codec.encode("!")[0])
    service = ScriptedService(lambda _: in_blocks(codec.encode("ab!").tolist(), 8, FinishReason.STOP))
    asked = request(ends=frozenset({end}))

    async def run() -> list[TextDelta]:
        return [delta async for delta in generate_text(service, asked, codec)]

    (delta,) = asyncio.run(run())
    assert delta.text == "ab" and len(delta.token_ids) == 3


def test_an_end_token_id_inside_a_text_that_ends_by_length_is_shown(codec: TextCodec) -> None:
    end = int(codec.encode("!")[0])
    assert texts_of(codec, in_blocks(codec.encode("ab!").tolist(), 8), request(ends=frozenset({end}))) == ["ab!"]


def test_a_failure_of_the_router_keeps_its_status_and_code(codec: TextCodec) -> None:
    with pytest.raises(GenerationFailedError) as failure:
        texts_of(codec, [GenerationFailed(429, "overloaded", "queue full")])
    assert (failure.value.status, failure.value.code, failure.value.error_type) == (
        429,
        "overloaded",
        "overloaded_error",
    )


def test_a_generation_that_ends_without_a_reason_is_an_error_not_a_stop(codec: TextCodec) -> None:
    with pytest.raises(UnavailableError):
        texts_of(codec, [TokenChunk(token_ids([5]))])


def test_a_silent_router_is_given_up_at_the_deadline(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "DEADLINE_GRACE_S", 0.1 - HANG_S)
    service = ScriptedService(lambda _: [TokenChunk(token_ids([5]))], delay_s=2 * HANG_S)

    async def run() -> None:
        await anext(generate_text(service, request(), codec))

    with pytest.raises(UnavailableError, match="in time"):
        asyncio.run(run())
    assert service.cancelled == ["r"]


def test_closing_a_request_cancels_every_choice(codec: TextCodec) -> None:
    service = ScriptedService(lambda _: in_blocks([5] * 50, 1), delay_s=0.01)

    async def run() -> None:
        choices = generate_choices(service, codec, [request("a"), request("b"), request("c")])
        await anext(choices)
        await choices.aclose()

    asyncio.run(run())
    assert sorted(service.cancelled) == ["a", "b", "c"]


def test_the_failure_of_one_choice_cancels_the_others(codec: TextCodec) -> None:
    failing = [GenerationFailed(503, "gone", "target lost")]
    service = ScriptedService(lambda r: failing if r.request_id == "b" else in_blocks([5] * 50, 1), delay_s=0.01)

    async def run() -> list[ChoiceDelta]:
        return [item async for item in generate_choices(service, codec, [request("a"), request("b")])]

    with pytest.raises(GenerationFailedError, match="target lost"):
        asyncio.run(run())
    assert service.cancelled == ["a"]
