"""Log-probabilities over HTTP: every shown token has its entry, no hidden one has, streamed or not."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.logprobs import IMPOSSIBLE, TokenPlaces
from deployments.text import TextCodec
from tests.deployments.both_ways import ask_both_ways, committing
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, says
from tests.fakes import ScriptedService, byte_tokenizer, toy_logprobs
from workers.messages import (
    FinishReason,
    GenerationRequest,
    TokenChunk,
    token_ids,
)

Clients = Callable[..., Any]
SAMPLE = "the cat and the hat 日本語 🙂é the end"
MERGED = TextCodec(byte_tokenizer(texts=[SAMPLE] * 3, merges=40))
"""Tokens of one byte and of several, some of which end in the middle of a character."""
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


# --- alignment with the text ---------------------------------------------------------------------------------


@given(
    text=st.text(st.sampled_from("the cand日本語🙂é "), min_size=1, max_size=24),
    noise=st.lists(st.tuples(st.integers(0, 24), st.integers(0, MERGED.vocabulary_size - 1)), max_size=3),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    stop=st.lists(st.text(st.sampled_from("the cand日🙂\ufffd "), min_size=1, max_size=4), max_size=2),
    ignore_eos=st.booleans(),
)
@settings(max_examples=60)
def test_streamed_entries_are_those_of_the_whole_answer_and_belong_to_its_text(
    text: str, noise: list[tuple[int, int]], lengths: list[int], stop: list[str], ignore_eos: bool
) -> None:
    ids = MERGED.encode(text).tolist()
    for place, token in noise:
        ids.insert(place, token)
    options = {"max_tokens": len(ids), "ignore_eos": ignore_eos, "stop": stop or None}
    script = committing(ids, lengths, MERGED)
    completion = ask_both_ways(script, MERGED, COMPLETIONS, {"prompt": [5], "logprobs": 2, **options})
    chat = ask_both_ways(script, MERGED, CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2, **options})

    lists, visible = completion["logprobs"], completion["text"]
    assert set(lists) == set(LISTS) and len({len(values) for values in lists.values()}) == 1
    content = chat["logprobs"]["content"]
    assert [entry["token"] for entry in content] == lists["tokens"]
    stopped = completion["finish_reason"] == "stop"
    hidden_end = stopped and not ignore_eos and 0 in ids[: len(content) + 1]
    if not stopped:
        assert len(content) == len(ids)
    if stopped and not hidden_end:
        assert all(offset < len(visible) for offset in lists["text_offset"])
    assert lists["text_offset"] == sorted(lists["text_offset"])
    if not noise:
        written = b"".join(bytes(entry["bytes"]) for entry in content)
        assert written == visible.encode() if not stopped else written.startswith(visible.encode())
        # What is there without the last token is not all of the text: each entry is of a token that shows.
        assert not content or not stopped or len(written) - len(content[-1]["bytes"]) < len(visible.encode())
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            whole = visible[offset:]
            assert "\ufffd" in token or whole.startswith(token) or token.startswith(whole)


@pytest.mark.parametrize("block", [1, 3, 9])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_entries_end_with_the_last_token_that_shows_before_a_stop_string(
    codec: TextCodec, block: int, path: str
) -> None:  # B12
    script = committing(codec.encode("the cat sat on the mat").tolist(), [block], codec)
    ask = {"prompt": "a", "logprobs": 2} if path == COMPLETIONS else {**HELLO, "logprobs": True, "top_logprobs": 2}
    choice = ask_both_ways(script, codec, path, {**ask, "max_tokens": 20, "stop": " sat"})
    if path == CHAT:
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "the cat"
        return
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "the cat"
    assert [len(choice["logprobs"][name]) for name in LISTS] == [7] * 4
    assert choice["logprobs"]["text_offset"] == list(range(7))


def test_a_token_that_shows_in_part_keeps_its_whole_entry() -> None:
    ids = MERGED.encode("the cat").tolist()
    the = MERGED.token_bytes.text_of(ids[0])
    assert len(the) > 2
    body = {"prompt": [5], "logprobs": 0, "max_tokens": len(ids), "stop": the[2:]}
    choice = ask_both_ways(committing(ids, [1], MERGED), MERGED, COMPLETIONS, body)
    assert (choice["text"], choice["logprobs"]["tokens"]) == (the[:2], [the])


def test_a_stop_string_at_the_very_beginning_leaves_no_entries(codec: TextCodec) -> None:
    script = committing(codec.encode("STOP it").tolist(), [9], codec)
    choice = ask_both_ways(script, codec, COMPLETIONS, {"prompt": "a", "logprobs": 1, "stop": "STOP"})
    assert choice["text"] == "" and choice["logprobs"] == {name: [] for name in LISTS}


def test_a_hidden_end_token_has_no_entry(codec: TextCodec) -> None:
    script = committing([*codec.encode("ab").tolist(), 0], [2], codec)
    choice = ask_both_ways(script, codec, CHAT, {**HELLO, "logprobs": True})
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_each_token_of_a_cut_block_has_one_entry(codec: TextCodec, max_tokens: int) -> None:  # B15
    ids = [*codec.encode("日本").tolist(), 0, 0, *codec.encode("some more").tolist()]
    body = {"prompt": "a", "logprobs": 0, "max_tokens": max_tokens, "ignore_eos": True}
    choice = ask_both_ways(committing(ids, [6], codec), codec, COMPLETIONS, body)
    assert choice["finish_reason"] == "length"
    assert [len(choice["logprobs"][name]) for name in LISTS] == [max_tokens] * 4
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])


def test_bytes_of_one_character_share_its_place(codec: TextCodec) -> None:
    body = {"prompt": "a", "logprobs": 0, "max_tokens": 5}
    choice = ask_both_ways(committing(codec.encode("x日y").tolist(), [2], codec), codec, COMPLETIONS, body)
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    assert choice["logprobs"]["tokens"] == ["x", "\ufffd", "\ufffd", "\ufffd", "y"]
    asked = {**HELLO, "logprobs": True, "max_tokens": 5}
    chat = ask_both_ways(committing(codec.encode("x日y").tolist(), [2], codec), codec, CHAT, asked)
    raw = [value for entry in chat["logprobs"]["content"] for value in entry["bytes"]]
    assert bytes(raw).decode() == "x日y"


def test_tokens_behind_bytes_that_became_no_character_keep_their_own_place(codec: TextCodec) -> None:
    broken = codec.encode("日").tolist()[:1]
    ids = [*broken, *codec.encode("STOP").tolist()]
    choice = ask_both_ways(
        committing(ids, [1], codec), codec, COMPLETIONS, {"prompt": "a", "logprobs": 0, "stop": "STOP"}
    )
    assert choice["text"] == "\ufffd" and choice["logprobs"]["tokens"] == ["\ufffd"]


def test_long_runs_without_a_character_are_placed_without_decoding_each_beginning() -> None:
    decoded: list[int] = []

    def decode(ids: Any) -> str:
        decoded.append(len(ids))
        return ""

    places = TokenPlaces(decode)
    assert [place for _ in range(5000) for place in places.push(0, "")] == []
    assert places.push(1, "a") == [0] * 5001
    assert len(decoded) <= 64


# --- values --------------------------------------------------------------------------------------------------


def test_completions_report_the_likeliest_tokens_and_always_the_chosen_one(client_of: Clients) -> None:
    client = client_of(ScriptedService(says([70, 71, 72])))
    logprobs = client.post(COMPLETIONS, json={"prompt": [5], "logprobs": 3, "max_tokens": 3}).json()["choices"][0][
        "logprobs"
    ]
    known = toy_logprobs([5, 70, 71, 72], 1, 3)
    assert logprobs["token_logprobs"] == known.chosen.tolist()
    for top, chosen, token in zip(
        logprobs["top_logprobs"], logprobs["token_logprobs"], logprobs["tokens"], strict=True
    ):
        assert top[token] == chosen and 1 <= len(top) <= 4


def test_a_chosen_token_that_reads_like_a_likelier_one_is_not_lost(client_of: Clients) -> None:
    lead, other = (byte_tokenizer().backend_tokenizer.encode(text).ids[0] for text in ("日", "é"))

    def script(request: GenerationRequest) -> list[TokenChunk]:
        logprobs = dataclasses.replace(
            toy_logprobs([5, lead], 1, 1), top_ids=token_ids([[other]]), chosen=token_ids([-7])  # type: ignore[arg-type]
        )  # fmt: skip
        return [TokenChunk(token_ids([lead]), None, FinishReason.LENGTH, logprobs=logprobs)]

    client = client_of(ScriptedService(script))
    choice = client.post(COMPLETIONS, json={"prompt": [5], "logprobs": 1, "max_tokens": 1}).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -7}]
    body = {**HELLO, "logprobs": True, "top_logprobs": 1}
    (entry,) = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -7 and entry["bytes"] != entry["top_logprobs"][0]["bytes"]


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "ask"), [
    (COMPLETIONS, {"prompt": [5, 6], "logprobs": 5, "echo": True}),
    (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 5}),
])  # fmt: skip
def test_impossible_tokens_are_finite_numbers_in_strict_json(
    client_of: Clients, path: str, ask: dict[str, Any], stream: bool
) -> None:  # B38
    body = {**ask, "top_k": 1, "logit_bias": {"70": -100}, "stream": stream, "max_tokens": 2}
    response = client_of(ScriptedService(says([71, 72]))).post(path, json=body)
    assert response.status_code == 200
    for line in response.text.split("\n\n"):
        if line and not line.endswith("[DONE]"):
            json.loads(line.removeprefix("data: "), parse_constant=refuse_constant)
    assert str(IMPOSSIBLE) in response.text


def test_nothing_is_asked_and_nothing_told_unless_the_client_asks(client_of: Clients) -> None:
    service = ScriptedService(says([70]))
    client = client_of(service)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {**HELLO, "logprobs": False, "top_logprobs": 0})):
        assert client.post(path, json=body).json()["choices"][0]["logprobs"] is None
        assert service.requests[-1].logprobs is None and not service.requests[-1].prompt_logprobs
    client.post(CHAT, json={**HELLO, "logprobs": True})
    assert service.requests[-1].logprobs == 0
    assert client.post(CHAT, json={**HELLO, "logprobs": True}).json()["choices"][0]["logprobs"]["refusal"] is None


def test_a_router_that_forgets_the_report_is_an_error_not_a_gap(client_of: Clients) -> None:
    chunk = TokenChunk(token_ids([70]), None, FinishReason.LENGTH)
    response = client_of(ScriptedService(lambda _: [chunk])).post(COMPLETIONS, json={"prompt": "a", "logprobs": 1})
    assert response.status_code == 500
