"""`echo`: the prompt before its completion, with its own log-probabilities, streamed or not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.text import TextCodec
from deployments.visible_text import echo_of_ids, echo_of_text
from tests.deployments.both_ways import ask_both_ways, committing
from tests.deployments.helpers import COMPLETIONS, events_of, logprobs_of, streamed_text
from tests.deployments.toy import PIECES, Post, with_toy_app
from tests.fakes import ScriptedService, byte_tokenizer, toy_logprobs
from workers.messages import FinishReason, GenerationFailed, TokenChunk, token_ids


@pytest.mark.parametrize(("prompt", "shown"), [
    ("日本 x", "日本 x"), ("a<|endoftext|>b", "a<|endoftext|>b"), ([66, 67], "bc"), ([66, 0, 67], "bc"),
])  # fmt: skip
def test_the_text_begins_with_the_prompt(client: Any, prompt: Any, shown: str) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 3}
    whole = client.post(COMPLETIONS, json=body).json()
    assert whole["choices"][0]["text"] == shown + "fgh"
    assert whole["choices"][0]["logprobs"] is None
    assert whole["usage"]["completion_tokens"] == 3
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert events[0]["choices"][0]["text"] == shown
    assert streamed_text(events) == shown + "fgh"


def test_each_prompt_is_echoed_by_each_of_its_choices(client: Any) -> None:
    body = {"prompt": ["one ", "two "], "echo": True, "n": 2, "max_tokens": 2}
    texts = ["one fg", "one fg", "two fg", "two fg"]
    assert [choice["text"] for choice in client.post(COMPLETIONS, json=body).json()["choices"]] == texts
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert [streamed_text(events, index) for index in range(4)] == texts


def test_prompts_are_scored_only_if_both_are_asked_for(client: Any, service: ScriptedService) -> None:
    for fields in ({"echo": True}, {"logprobs": 0}, {"logprobs": 0, "echo": True}):
        client.post(COMPLETIONS, json={"prompt": "ab", **fields})
    assert [asked.prompt_logprobs for asked in service.requests] == [False, False, True]


def test_entries_of_the_prompt_come_first_and_its_first_token_has_no_value(client: Any) -> None:
    body = {"prompt": "a日", "echo": True, "logprobs": 2, "max_tokens": 2}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "a日fg"
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "\ufffd", "f", "g"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3]
    known = toy_logprobs([66, 231, 152, 166, 71, 72], 1, 2).chosen.tolist()
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(known) + 1 == len(logprobs["top_logprobs"])
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert events[0]["choices"][0]["text"] == "a日"
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == 4
    assert logprobs_of(events) == logprobs


def test_a_prompt_that_is_never_wholly_scored_is_an_error_not_a_gap(client_of: Any) -> None:
    chunk = TokenChunk(token_ids([70]), logprobs=toy_logprobs([5, 70], 1, 0))
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0}
    assert client_of(ScriptedService(lambda _: [chunk])).post(COMPLETIONS, json=body).status_code == 500
    unscored = [TokenChunk(token_ids([]), None, FinishReason.LENGTH)]
    nothing = {**body, "max_tokens": 0}
    assert client_of(ScriptedService(lambda _: unscored)).post(COMPLETIONS, json=nothing).status_code == 500
    failed = [GenerationFailed(503, "gone", "the target is gone")]
    assert client_of(ScriptedService(lambda _: failed)).post(COMPLETIONS, json=body).status_code == 503


@pytest.mark.parametrize("stop", ["cat", " ca", "e ca"])
def test_a_stop_string_in_the_completion_leaves_the_prompts_entries_alone(codec: TextCodec, stop: str) -> None:
    script = committing(codec.encode("the cat").tolist(), [2], codec)
    body = {"prompt": "cat cat", "echo": True, "logprobs": 1, "stop": stop, "max_tokens": 7}
    choice = ask_both_ways(script, codec, COMPLETIONS, body)
    assert choice["text"] == "cat cat" + "the cat"[: "the cat".index(stop)]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == list(range(len(choice["text"])))


# --- nothing but the prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_prompt_may_be_scored_without_a_completion(client: Any, service: ScriptedService, logprobs: Any) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = client.post(COMPLETIONS, json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 0)
    assert service.requests[-1].stop.max_tokens == 0
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert streamed_text(events) == "abc"
    assert logprobs_of(events) == (choice["logprobs"] or {})


def test_a_scored_prompt_may_fill_the_context_to_its_last_position(client: Any) -> None:
    body = {"prompt": [5] * 64, "echo": True, "max_tokens": 0}
    assert client.post(COMPLETIONS, json=body).status_code == 200
    error = client.post(COMPLETIONS, json={**body, "prompt": [5] * 65}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_without_echo_something_must_be_generated(client: Any) -> None:
    error = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 0}).json()["error"]
    assert error["param"] == "max_tokens" and "echo" in error["message"]


# --- over a real router --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_scores_of_prompt_and_completion_are_those_of_their_positions(chunk_tokens: int, max_tokens: int) -> None:
    prompt = [(position * 5) % 16 for position in range(40)]

    async def test(post: Post) -> None:
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "return_token_ids": True}
        choice = (await post(COMPLETIONS, **body, seed=3, n=2)).json()["choices"][1]
        tokens = [*prompt, *choice["token_ids"]]
        known = toy_logprobs(tokens, 1, 2)
        logprobs = choice["logprobs"]
        assert choice["text"] == "".join(PIECES[token] for token in tokens)
        assert logprobs["tokens"] == [PIECES[token] for token in tokens]
        assert logprobs["token_logprobs"] == [None, *known.chosen.tolist()]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
        events = events_of((await post(COMPLETIONS, **body, seed=3, n=2, stream=True)).text)
        assert logprobs_of(events, 1) == logprobs
        assert streamed_text(events, 1) == choice["text"]

    with_toy_app(test, prefill_chunk_tokens=chunk_tokens)


# --- places in the prompt ------------------------------------------------------------------------------------

MERGED = TextCodec(byte_tokenizer(texts=["the cat and the hat 日本語 🙂é"] * 3, merges=40))


@given(text=st.text(st.sampled_from("the cand日本語🙂é "), min_size=1, max_size=30))
@settings(max_examples=50)
def test_each_token_of_a_prompt_begins_where_its_text_does(text: str) -> None:
    ids = MERGED.encode(text)
    echoed = echo_of_text(MERGED, text, ids)
    assert echoed == echo_of_ids(MERGED, ids)
    assert echoed.text == text and len(echoed.text_offsets) == len(ids)
    assert list(echoed.text_offsets) == sorted(echoed.text_offsets)
    for token, offset in zip(ids.tolist(), echoed.text_offsets, strict=True):
        word = MERGED.token_bytes.text_of(token)
        assert "\ufffd" in word or text[offset:].startswith(word)


def test_special_tokens_in_a_prompt_given_as_text_have_a_place_too(codec: TextCodec) -> None:
    text = "a<|endoftext|>b"
    echoed = echo_of_text(codec, text, codec.encode(text))
    assert (echoed.text, echoed.text_offsets) == (text, (0, 1, 14))
