from collections.abc import Callable
from typing import Any

import pytest
from openai.types import completion_create_params as params
from openai.types.chat import completion_create_params as chat_params

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, error_of
from tests.fakes import ScriptedService, byte_tokenizer

Clients = Callable[..., Any]
USER = {"role": "user", "content": "hi"}


def alive(client: Any) -> bool:
    plain = client.post(COMPLETIONS, json={"prompt": "a"})
    return bool(plain.status_code == client.get("/health").status_code == 200)


def refused(client: Any, body: object, path: str = COMPLETIONS, status: int = 400) -> dict[str, Any]:
    """The error of `body`, which must be the same plain JSON with and without stream."""
    errors = []
    for stream in (False, True):
        sent = {**body, "stream": stream} if isinstance(body, dict) else body
        errors.append(error_of(client.post(path, json=sent), status))
    assert errors[0] == errors[1]
    assert alive(client)
    return errors[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_grammar", "root ::= 1"), ("suffix", "z"), ("prompt_logprobs", 1),
    ],
)  # fmt: skip
def test_options_that_are_not_honoured_are_refused_by_name(client: Any, field: str, value: object) -> None:
    error = refused(client, {"prompt": "a", field: value})
    assert error["param"] == field and field in error["message"] and "not supported" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("functions", [{}]), ("tool_choice", "auto"), ("echo", True), ("verbosity", "low"), ("store", True)],
)
def test_chat_options_that_are_not_honoured_are_refused_by_name(client: Any, field: str, value: object) -> None:
    assert refused(client, {**HELLO, field: value}, CHAT)["param"] == field


# Of vLLM's own options, those of requests that vLLM's client library documents.
VLLM_FIELDS = {
    "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "guided_choice", "guided_decoding_backend",
    "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "ignore_eos",
    "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logits_processors", "min_p", "min_tokens",
    "priority", "prompt_logprobs", "repetition_penalty", "return_token_ids", "return_tokens_as_token_ids",
    "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "structured_outputs", "top_k",
    "truncate_prompt_tokens", "use_beam_search", "vllm_xargs",
}  # fmt: skip
ASKED = [
    (CHAT, HELLO, {*chat_params.CompletionCreateParamsStreaming.__annotations__, *VLLM_FIELDS}),
    (COMPLETIONS, {"prompt": "a"}, {*params.CompletionCreateParamsStreaming.__annotations__, *VLLM_FIELDS}),
]


@pytest.mark.parametrize(("path", "body", "fields"), ASKED)
def test_no_field_of_openai_or_vllm_is_ignored(client: Any, path: str, body: dict[str, Any], fields: set[str]) -> None:
    assert len(fields) > 40
    for field in sorted(fields):
        error = error_of(client.post(path, json={**body, field: [{"?": [1]}]}))
        assert (error["param"] or "").split("[")[0].split(".")[0] == field, (field, error)


@pytest.mark.parametrize(("path", "body", "fields"), ASKED)
def test_null_for_a_field_of_openai_or_vllm_asks_for_nothing(
    client: Any, path: str, body: dict[str, Any], fields: set[str]
) -> None:
    optional = sorted(fields - set(body))
    assert client.post(path, json={**body, **dict.fromkeys(optional)}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("temperature", -0.1), ("temperature", [1]),
        ("temperature", 10**400), ("max_tokens", -3), ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True),
        ("top_p", 1.5), ("top_p", 0), ("top_k", -2), ("top_k", 2**40), ("top_k", 1.5), ("seed", -1), ("seed", 2**63),
        ("stop", [""]), ("stop", ""), ("stop", [1]), ("stop", 7), ("stop", ["x"] * 17), ("stream", "yes"),
        ("model", 3), ("user", 3), ("nonsense", 1), ("n", 0), ("n", 17), ("n", True), ("n", 1.5), ("best_of", 3),
        ("best_of", 0), ("best_of", True), ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("logprobs", "5"),
        ("echo", 1),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_by_name(client: Any, field: str, value: object) -> None:  # B21, B36
    sent = {"prompt": "a", field: value}
    error = error_of(client.post(COMPLETIONS, json=sent)) if field == "stream" else refused(client, sent)
    assert error["param"] == field and error["message"].startswith(field)
    assert alive(client)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_impossible_values_in_chats_are_refused_by_name(client: Any, fields: dict[str, Any], param: str) -> None:
    assert refused(client, {**HELLO, **fields}, CHAT)["param"] == param


def test_choices_of_all_prompts_together_are_limited(client: Any) -> None:
    assert refused(client, {"prompt": ["a"] * 5, "n": 13})["param"] == "n"
    assert client.post(COMPLETIONS, json={"prompt": ["a"] * 4, "n": 16}).status_code == 200


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[5], []], ["a", ""], None, {}, 5, ["x"] * 65])
def test_prompts_that_are_empty_or_no_prompts_are_refused(client: Any, prompt: object) -> None:
    assert refused(client, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    "prompt", [[-1], [257], [262], [2**70], [1.5], [5.0], [True], ["a", 1], [[5], "a"], [[[5]]], [None]]
)
def test_prompt_ids_outside_the_vocabulary_are_refused(client: Any, prompt: object) -> None:
    error = refused(client, {"prompt": prompt})
    assert error["param"] == "prompt" and error["message"].count("prompt") == 1


def test_a_request_beyond_the_context_names_the_three_numbers(client: Any) -> None:
    error = refused(client, {"prompt": [5] * 8, "max_tokens": 60})
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert all(number in error["message"].split() for number in ("64", "8", "60"))


@pytest.mark.parametrize("prompt", [[5] * 80, [5] * 64, "x" * 80, ["a", "x" * 80]])
def test_a_prompt_that_fills_the_context_is_refused(client: Any, prompt: object) -> None:
    error = refused(client, {"prompt": prompt})
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"


def test_a_conversation_that_fills_the_context_is_refused(client: Any) -> None:
    assert refused(client, {"messages": [{"role": "user", "content": "x" * 80}]}, CHAT)["param"] == "messages"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{**USER, "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{**USER, "colour": "red"}], "messages[0].colour"),
    ],
)
def test_messages_that_are_none_are_refused_where_they_are_wrong(client: Any, messages: object, param: str) -> None:
    assert refused(client, {"messages": messages}, CHAT)["param"] == param


def test_a_template_that_refuses_gives_its_reason(client_of: Clients, service: ScriptedService) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must start with user') }}{% endif %}hi"
    client = client_of(service, codec=TextCodec(byte_tokenizer(template)))
    error = refused(client, {"messages": [{"role": "assistant", "content": "x"}]}, CHAT)
    assert error["param"] == "messages" and "must start with user" in error["message"]


def test_a_model_without_template_refuses_chats(client_of: Clients, service: ScriptedService) -> None:
    client = client_of(service, codec=TextCodec(byte_tokenizer(None)))
    assert "no chat template" in refused(client, HELLO, CHAT)["message"]


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        ({"drafter": "nope"}, "speculation.drafter"),
        ({"max_draft_tokens": 9}, "speculation.max_draft_tokens"),
        ({"max_draft_tokens": 33}, "speculation.max_draft_tokens"),
        ({"max_draft_tokens": -1}, "speculation.max_draft_tokens"),
        ({"verification": "magic"}, "speculation.verification"),
        ({"enabled": 1}, "speculation.enabled"),
        ({"x": 1}, "speculation.x"),
        (True, "speculation"),
    ],
)
def test_speculation_that_is_not_offered_is_refused(client: Any, speculation: object, param: str) -> None:
    assert refused(client, {"prompt": "a", "speculation": speculation})["param"] == param


def test_stream_options_are_for_streams(client: Any) -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    assert error_of(client.post(COMPLETIONS, json=body))["param"] == "stream_options"
    wrong = {"prompt": "a", "stream": True, "stream_options": {"include_usage": "yes"}}
    assert error_of(client.post(COMPLETIONS, json=wrong))["param"] == "stream_options.include_usage"


def test_two_different_limits_are_refused(client: Any) -> None:
    assert client.post(CHAT, json={**HELLO, "max_tokens": 3, "max_completion_tokens": 3}).status_code == 200
    error = refused(client, {**HELLO, "max_tokens": 3, "max_completion_tokens": 4}, CHAT)
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"", b"[]", b"5", b"null", b"\xff\xfe{", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}', b'{"prompt": ["\\uDC00"]}', b'{"model": "\\ud83d"}',
        b"[" * 50_000, b'{"prompt": ' + b"[" * 40_000, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_not_sound_json_are_refused(client: Any, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        error_of(client.post(path, content=body, headers={"content-type": "application/json"}))
    assert alive(client)


def test_pairs_of_surrogate_escapes_are_ordinary_text(client: Any, service: ScriptedService, codec: TextCodec) -> None:
    assert client.post(COMPLETIONS, content=b'{"prompt": "\\ud83d\\ude42"}').status_code == 200
    assert codec.backend.decode(service.requests[0].prompt.tolist()) == "🙂"


def test_json_is_read_whatever_the_content_type_says(client: Any) -> None:
    response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 200


def test_a_body_beyond_the_limit_is_refused(client: Any) -> None:
    assert error_of(client.post(COMPLETIONS, json={"prompt": "x" * 100_001}), 413)["code"] == "request_too_large"
    parts = (b"x" * 10_000 for _ in range(11))
    error_of(client.post(COMPLETIONS, content=parts), 413)
    assert alive(client)


def test_an_unknown_model_is_not_found(client: Any) -> None:
    error = refused(client, {"prompt": "a", "model": "nope"}, status=404)
    assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "invalid_request_error")


def test_unknown_paths_and_methods_are_answered_like_any_error(client: Any) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    response = client.get(COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed" and response.headers["allow"] == "POST"


def test_an_unexpected_error_is_a_plain_500(client_of: Clients) -> None:
    def script(_: object) -> Any:
        raise RuntimeError("secret")

    for stream in (False, True):
        response = client_of(ScriptedService(script)).post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert error_of(response, 500)["code"] == "internal_error" and "secret" not in response.text
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "guided_json", "metadata", "nonsense", "store"])
def test_bodies_that_nest_too_deeply_are_refused_at_any_depth(client: Any, field: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "' + field.encode() + b'": %s}'
    for depth in (127, 128, 200, 300, *range(700, 1000, 7), 5_000):
        error_of(client.post(CHAT, content=body % (b'{"a":' * depth + b"1" + b"}" * depth)))
    assert alive(client)


def test_arguments_of_calls_that_nest_deeply_are_never_a_server_error(client_of: Clients, service: Any) -> None:
    knows_calls = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    client = client_of(service, codec=TextCodec(byte_tokenizer(knows_calls)))
    for depth in (2, 100, 400, *range(700, 1000, 3), 5_000):
        call = {"function": {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}}
        response = client.post(CHAT, json={"messages": [{"role": "assistant", "tool_calls": [call]}]})
        assert response.status_code == (200 if depth == 2 else 400), response.text
