from collections.abc import Callable
from typing import Any

import pytest

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, LIMITS, error_of
from tests.fakes import ScriptedService

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("prompt", ["", "ab", "日本🙂é x", "x" * 30_000])
def test_a_text_is_tokenized_as_completions_read_it_and_back(client: Any, codec: TextCodec, prompt: str) -> None:
    answer = client.post(TOKENIZE, json={"model": "tiny", "prompt": prompt}).json()
    tokens = codec.encode(prompt).tolist()
    assert answer == {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}
    assert client.post(DETOKENIZE, json={"tokens": tokens}).json() == {"prompt": prompt}


def test_a_conversation_is_tokenized_as_chats_read_it(client: Any, service: ScriptedService) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "so"}]}
    for fields in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        tokens = client.post(TOKENIZE, json={**body, **fields}).json()["tokens"]
        assert client.post(CHAT, json={**body, **fields, "max_tokens": 1}).status_code == 200
        assert tokens == service.requests[-1].prompt.tolist()


def test_tokens_are_named_when_asked_for(client: Any, codec: TextCodec) -> None:
    answer = client.post(TOKENIZE, json={"prompt": "a b", "return_token_strs": True}).json()
    assert answer["token_strs"] == [codec.backend.id_to_token(token) for token in answer["tokens"]]


def test_special_tokens_are_left_out_when_asked_for(client: Any) -> None:
    plain = client.post(TOKENIZE, json={"prompt": "ab", "add_special_tokens": False})
    assert client.post(DETOKENIZE, json={"tokens": plain.json()["tokens"]}).json() == {"prompt": "ab"}


def test_detokenized_text_has_the_special_tokens(client: Any) -> None:
    assert client.post(DETOKENIZE, json={"tokens": [0, 70]}).json()["prompt"].startswith("<|endoftext|>")
    assert client.post(DETOKENIZE, json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": None}, "prompt"),
        (TOKENIZE, {"prompt": ["a"]}, "prompt"),
        (TOKENIZE, {"prompt": [5]}, "prompt"),
        (TOKENIZE, {"prompt": "a", "colour": 1}, "colour"),
        (TOKENIZE, {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        (TOKENIZE, {"prompt": "a", "messages": [USER]}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"messages": [{"role": "king"}]}, "messages[0].role"),
        (TOKENIZE, {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        (TOKENIZE, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": "ab"}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [1, 1.0]}, "tokens[1]"),
        (DETOKENIZE, {"tokens": [True]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [257]}, "tokens"),
        (DETOKENIZE, {"tokens": [2**70]}, "tokens"),
        (DETOKENIZE, {"tokens": [1], "colour": 1}, "colour"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(client: Any, path: str, body: dict[str, Any], param: str) -> None:
    error = error_of(client.post(path, json=body))
    assert error["param"] == param and error["message"].startswith(param)


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
def test_bodies_are_checked_as_everywhere(client: Any, path: str) -> None:
    for body in (b"", b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}'):
        error_of(client.post(path, content=body))
    error_of(client.post(path, content=b"x" * (LIMITS.max_body_bytes + 1)), 413)
    assert error_of(client.get(path), 405)["code"] == "method_not_allowed"
    fields = {"prompt": "a"} if path == TOKENIZE else {"tokens": [1]}
    assert error_of(client.post(path, json={**fields, "model": "nope"}), 404)["code"] == "model_not_found"


def test_a_text_longer_than_the_context_is_still_counted(client_of: Callable[..., Any], service: Any) -> None:
    client = client_of(service)
    assert client.post(TOKENIZE, json={"prompt": "x" * 80}).json()["count"] == 80
    error_of(client.post(COMPLETIONS, json={"prompt": "x" * 80}))
