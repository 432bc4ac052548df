import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, LIMITS, SOME, error_of, events_of
from tests.fakes import ScriptedService
from workers.messages import SpeculationOptions, Verification

Clients = Callable[..., Any]
USER = {"role": "user", "content": "hi"}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_a_completion_counts_and_reports_what_it_did(client: Any) -> None:
    answer = client.post(COMPLETIONS, json={"model": "tiny", "prompt": "ab", "max_tokens": 3}).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "tiny"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 3, 5)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["speculation"] == {
        "verifications": 1,
        "draft_tokens": 3,
        "accepted_tokens": 2,
        "accepted_length": 3.0,
        "accepted_per_position": [1, 1],
        "drafter": "scripted",
        "fallback_rounds": 0,
    }


def test_a_request_reaches_the_service_as_it_was_meant(client: Any, service: ScriptedService) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "seed": 7,
        "stop": ["x", "yz"],
    }
    body |= {"speculation": {"enabled": False, "max_draft_tokens": 4, "verification": "coupled", "drafter": "scripted"}}
    assert client.post(COMPLETIONS, json=body, headers={"traceparent": parent}).status_code == 200
    (asked,) = service.requests
    assert asked.prompt.tolist() == [5, 6]
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p, asked.sampling.seed) == (
        0,
        0,
        0.5,
        7,
    )
    assert (asked.stop.max_tokens, asked.stop.stop_strings, asked.stop.end_token_ids) == (
        3,
        ("x", "yz"),
        frozenset({0}),
    )
    assert asked.speculation == SpeculationOptions(False, 4, "scripted", Verification.COUPLED)
    assert asked.timeout_s == 30.0 and asked.trace_context == {"traceparent": parent}


def test_requests_without_a_seed_get_different_ones(client: Any, service: ScriptedService) -> None:
    for _ in range(20):
        client.post(COMPLETIONS, json={"prompt": ["a", "a"]})
    seeds = {asked.sampling.seed for asked in service.requests}
    assert len(seeds) == 40 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("given", [None, 2**63 - 1])
def test_the_seed_is_told_so_that_the_answer_can_be_repeated(
    client: Any, service: ScriptedService, given: int | None
) -> None:
    for path, ask in ((COMPLETIONS, {"prompt": ["a", "a"]}), (CHAT, HELLO)):
        for stream in (False, True):
            answer = client.post(path, json={**ask, "n": 2, "seed": given, "stream": stream})
            used = [asked.sampling.seed for asked in service.requests]
            service.requests.clear()
            parts = events_of(answer.text)[:-1] if stream else [answer.json()]
            choices = [choice for part in parts for choice in part["choices"]]
            told = {choice["index"]: choice["seed"] for choice in choices if choice["finish_reason"]}
            assert told == dict(enumerate(used))
            assert [choice for choice in choices if "seed" in choice and not choice["finish_reason"]] == []
            if given is None:
                assert max(used) < 2**53  # what a client that reads numbers as doubles can send back
                assert used[::2] == used[1::2] and len(set(used)) == len(used) // 2
            else:
                assert set(used) == {given}


def test_a_seed_is_used_for_every_prompt(client: Any, service: ScriptedService) -> None:
    for _ in range(2):
        client.post(COMPLETIONS, json={"prompt": ["a", "b"], "seed": 42})
    assert {(asked.sampling.seed, asked.sampling.choice) for asked in service.requests} == {(42, 0)}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (["a", "b c"], None),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("a", None),
        ([256], [[256]]),
    ],
)
def test_every_prompt_gets_its_choice(
    client: Any, service: ScriptedService, codec: TextCodec, prompt: Any, ids: list[list[int]] | None
) -> None:
    texts = [prompt] if isinstance(prompt, str) else prompt
    expected = ids or [codec.encode(text).tolist() for text in texts]
    answer = client.post(COMPLETIONS, json={"prompt": prompt}).json()
    assert [asked.prompt.tolist() for asked in service.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 3 * len(expected)


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        ([{"role": "assistant", "content": "so"}], "assistant: so\nassistant:"),
        ([USER, {"role": "assistant", "content": None}], "user: hi\nassistant: \nassistant:"),
        ([USER, {"role": "assistant"}], "user: hi\nassistant: \nassistant:"),
        ([{"role": "user", "content": ""}], "user: \nassistant:"),
        ([{"role": "user", "content": [text_part("a"), text_part("b")]}], "user: a\nb\nassistant:"),
        ([{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}], "assistant: x\nassistant:"),
    ],
)  # fmt: skip
def test_conversations_that_openai_allows_are_answered(
    client: Any, service: ScriptedService, codec: TextCodec, messages: Any, read: str
) -> None:
    for stream in (False, True):
        assert client.post(CHAT, json={"messages": messages, "stream": stream}).status_code == 200
    assert codec.backend.decode(service.requests[0].prompt.tolist()) == read


def test_a_chat_may_use_what_is_left_of_the_context(client: Any, service: ScriptedService) -> None:
    client.post(CHAT, json=HELLO)
    (asked,) = service.requests
    assert asked.stop.max_tokens == 64 - len(asked.prompt)
    client.post(CHAT, json={**HELLO, "max_completion_tokens": 5})
    assert service.requests[-1].stop.max_tokens == 5


@pytest.mark.parametrize(("prompt_tokens", "budget"), [(8, 16), (60, 4), (63, 1)])
def test_a_completion_without_limit_gets_sixteen_tokens_or_what_is_left(
    client: Any, service: ScriptedService, prompt_tokens: int, budget: int
) -> None:
    assert client.post(COMPLETIONS, json={"prompt": [5] * prompt_tokens}).status_code == 200
    assert service.requests[0].stop.max_tokens == budget


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "logprobs": None, "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0},
        {"repetition_penalty": 1.0, "min_p": 0, "stop_token_ids": [], "echo": False, "suffix": None, "user": "me"},
        {
            "temperature": None,
            "seed": None,
            "stop": None,
            "stream_options": None,
            "speculation": None,
            "max_tokens": None,
        },
    ],
)
def test_options_that_ask_for_nothing_are_accepted(client: Any, fields: dict[str, Any]) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "a", **fields}).status_code == 200


def test_chat_options_that_ask_for_nothing_are_accepted(client: Any) -> None:
    fields = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "logprobs": False, "n": 1}
    assert client.post(CHAT, json={**HELLO, **fields, "parallel_tool_calls": True}).status_code == 200


def test_the_served_model_is_listed(client: Any) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 64)
    assert client.get("/v1/models/tiny").json() == card
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_a_model_name_may_hold_slashes(client_of: Clients, service: ScriptedService) -> None:
    client = client_of(service, dataclasses.replace(LIMITS, served_model_name="org/tiny"))
    assert client.get("/v1/models/org/tiny").json()["id"] == "org/tiny"


def test_token_ids_come_with_every_choice_when_asked_for_streamed_or_not(client: Any) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "return_token_ids": True}
    whole = client.post(COMPLETIONS, json=body).json()
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    chat = client.post(CHAT, json={**HELLO, "max_tokens": 3, "return_token_ids": True}).json()
    assert whole["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"] == SOME
    streamed = [token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"]]
    assert streamed == SOME


def test_status_lists_the_workers_and_the_totals_of_rounds(client: Any) -> None:
    status = client.get("/status").json()
    assert status["workers"][0]["registration"]["role"] == "target"
    assert status["totals"]["rounds"] == 0
