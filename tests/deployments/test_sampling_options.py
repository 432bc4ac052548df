"""Sampling options over HTTP: what reaches the router, and what is refused by name before a stream opens."""

from collections.abc import Callable
from typing import Any

import pytest

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, error_of, events_of, says, streamed_text
from tests.fakes import ScriptedService, byte_tokenizer, word_tokenizer
from workers.messages import FinishReason, LogitRules

Clients = Callable[..., Any]


def asked_by(client: Any, service: ScriptedService, **options: Any) -> Any:
    """What the service is asked with these options, which must be the same for both endpoints."""
    assert client.post(COMPLETIONS, json={"prompt": "a", "seed": 1, **options}).status_code == 200
    assert client.post(CHAT, json={**HELLO, "max_tokens": 16, "seed": 1, **options}).status_code == 200
    completion, chat = service.requests[-2:]
    assert (completion.sampling, completion.stop) == (chat.sampling, chat.stop)
    return completion


def refused(client: Any, **options: Any) -> str:
    """The message of the refusal: plain JSON that names the option, for both endpoints, streaming or not."""
    name = next(iter(options))
    messages = set()
    for stream in (False, True):
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)):
            error = error_of(client.post(path, json={**body, "stream": stream, **options}))
            assert error["param"] == name and error["message"].startswith(name)
            messages.add(error["message"])
    assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == client.get("/health").status_code == 200
    return messages.pop()


def test_cache_salt_reaches_the_router_and_must_be_a_short_string(client: Any, service: ScriptedService) -> None:
    assert asked_by(client, service, cache_salt="tenant").cache_salt == "tenant"
    assert service.requests[-1].cache_salt == "tenant"
    assert asked_by(client, service, cache_salt=None).cache_salt is None
    for salt in ("", "x" * 257, 5):
        refused(client, cache_salt=salt)


# --- ends ----------------------------------------------------------------------------------------------------


def test_without_options_no_rules_travel(client: Any, service: ScriptedService) -> None:
    asked = asked_by(client, service, min_tokens=0, stop_token_ids=[], ignore_eos=False)
    assert asked.sampling.rules is None
    assert (asked.stop.end_token_ids, asked.stop.min_tokens) == ({0}, 0)


def test_stop_token_ids_end_beside_eos_or_instead_of_it(client: Any, service: ScriptedService) -> None:
    assert asked_by(client, service, stop_token_ids=[5, 256, 5]).stop.end_token_ids == {0, 5, 256}
    assert asked_by(client, service, stop_token_ids=[5], ignore_eos=True).stop.end_token_ids == {5}
    assert asked_by(client, service, ignore_eos=True).stop.end_token_ids == frozenset()


def test_min_tokens_holds_back_all_ends(client: Any, service: ScriptedService) -> None:
    asked = asked_by(client, service, min_tokens=3, stop_token_ids=[7], stop="x")
    assert asked.stop.min_tokens == 3
    assert asked.sampling.rules == LogitRules(min_tokens=3, end_token_ids=(0, 7))
    ignoring = asked_by(client, service, min_tokens=3, ignore_eos=True)
    assert ignoring.sampling.rules == LogitRules(min_tokens=3, end_token_ids=(0,))


def test_end_ids_that_the_tokenizer_does_not_have_are_not_sent_to_the_workers(
    client_of: Clients, service: ScriptedService, codec: TextCodec
) -> None:
    client = client_of(service, codec=TextCodec(byte_tokenizer(), frozenset({300})))
    assert asked_by(client, service, min_tokens=3).sampling.rules.end_token_ids == (0,)


def test_a_stop_token_is_counted_and_not_shown(client_of: Clients, codec: TextCodec) -> None:
    ids = codec.encode("ab!").tolist()
    client = client_of(ScriptedService(says(ids, finish_reason=FinishReason.STOP)))
    body = {"prompt": "a", "stop_token_ids": [ids[-1]], "return_token_ids": True}
    answer = client.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "stop"
    assert streamed_text(events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)) == "ab"


@pytest.mark.parametrize(
    "value", [[999999], [257], [-1], [1.5], ["5"], [True], 5, "5", {"5": 1}, [[5]], list(range(257))]
)
def test_stop_token_ids_that_are_none_are_refused(client: Any, value: object) -> None:
    refused(client, stop_token_ids=value)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True, [2], 2**70])
def test_impossible_min_tokens_are_refused(client: Any, value: object) -> None:
    refused(client, min_tokens=value)


def test_more_min_tokens_than_max_tokens_are_refused(client: Any) -> None:
    assert "5" in refused(client, min_tokens=5, max_tokens=4)
    refused(client, min_tokens=64)
    assert client.post(COMPLETIONS, json={"prompt": "a", "min_tokens": 4, "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize("value", [1, "yes", []])
def test_ignore_eos_is_a_boolean(client: Any, value: object) -> None:
    refused(client, ignore_eos=value)


def test_an_id_out_of_range_is_refused_whatever_stands_beside_it(client: Any) -> None:
    refused(client, stop_token_ids=[999999], min_tokens=2)


# --- logit_bias ----------------------------------------------------------------------------------------------


def test_biases_reach_the_workers_by_token_id(client: Any, service: ScriptedService) -> None:
    asked = asked_by(client, service, logit_bias={"5": -100, "256": 2.5, "0": 100})
    assert asked.sampling.rules == LogitRules(logit_bias=((5, -100.0), (256, 2.5), (0, 100.0)))
    assert asked_by(client, service, logit_bias={}).sampling.rules is None
    assert asked_by(client, service, logit_bias=None).sampling.rules is None


@pytest.mark.parametrize(
    "value",
    [
        {"999999": 5}, {"257": 1}, {"abc": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {" 5": 1}, {"05": 1}, {"5": 1, "5_0": 1},
        {"9" * 5000: 1}, {"\u0665": 1}, {"5": 101}, {"5": -100.5}, {"5": True}, {"5": "1"}, {"5": None}, {"5": 10**400},
        [5], [[5, 1]], 5, "5", {str(token): 0 for token in range(1025)},
    ],
)  # fmt: skip
def test_biases_that_are_none_are_refused(client: Any, value: object) -> None:
    refused(client, logit_bias=value)


# --- penalties -----------------------------------------------------------------------------------------------


def test_penalties_reach_the_workers(client: Any, service: ScriptedService) -> None:
    asked = asked_by(client, service, presence_penalty=-2, frequency_penalty=1.5, repetition_penalty=1.3)
    expected = LogitRules(repetition_penalty=1.3, presence_penalty=-2.0, frequency_penalty=1.5)
    assert asked.sampling.rules == expected
    neutral = asked_by(client, service, presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1)
    assert neutral.sampling.rules is None


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["1", True, [1], {}, 10**400])
def test_penalties_that_are_no_numbers_are_refused(client: Any, name: str, value: object) -> None:
    refused(client, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 2.1), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0),
    ],
)  # fmt: skip
def test_penalties_out_of_range_are_refused(client: Any, name: str, value: float) -> None:
    refused(client, **{name: value})


# --- min_p ---------------------------------------------------------------------------------------------------


def test_min_p_reaches_the_workers(client: Any, service: ScriptedService) -> None:
    assert asked_by(client, service, min_p=0.2).sampling.min_p == 0.2
    assert asked_by(client, service, min_p=1).sampling.min_p == 1
    assert asked_by(client, service).sampling.min_p == 0


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.1", True, [0.1], 10**400])
def test_impossible_min_p_is_refused(client: Any, value: object) -> None:
    refused(client, min_p=value)


# --- bad_words -----------------------------------------------------------------------------------------------


def words_of(codec: TextCodec, *texts: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(codec.encode(text).tolist()) for text in texts)


def test_bad_words_reach_the_workers_as_ids(client: Any, service: ScriptedService, codec: TextCodec) -> None:
    # With a token per byte a space always adds a token, so the word itself covers both.
    asked = asked_by(client, service, bad_words=["x", "no way", "x", "  x", "日"])
    assert asked.sampling.rules == LogitRules(bad_words=words_of(codec, "x", "no way", "日"))
    assert asked_by(client, service, bad_words=[]).sampling.rules is None


def test_words_are_banned_with_and_without_a_leading_space_where_it_makes_another_token(
    client_of: Clients, service: ScriptedService
) -> None:
    codec = TextCodec(word_tokenizer(["good", " good", " ", "b", "a", "d", " b", "York", "shire", " Yorkshire", "x"]))
    client = client_of(service, codec=codec)
    word = codec.backend.get_vocab()
    asked = asked_by(client, service, bad_words=[" good", "bad", "Yorkshire", "x"])
    assert asked.sampling.rules.bad_words == (
        (word["good"],), (word[" good"],),
        (word["b"], word["a"], word["d"]), (word[" b"], word["a"], word["d"]),
        (word["York"], word["shire"]), (word[" Yorkshire"],),
        (word["x"],),
    )  # fmt: skip


@pytest.mark.parametrize(
    "value", ["x", [""], ["x", ""], ["  "], [1], [["x"]], {"x": 1}, 5, True, ["x"] * 257, ["x" * 4097], ["\n"]]
)
def test_bad_words_that_are_none_are_refused(client: Any, value: object) -> None:
    refused(client, bad_words=value)
