"""Faults in requests that users of comparable systems reported, tried over a real connection."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, SOME, error_of, events_of, post, says
from tests.fakes import ScriptedService
from tests.limits import HANG_S

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def url(serving: Callable[..., Any], service: ScriptedService) -> Iterator[str]:
    with serving(service) as url:
        yield url


def assert_alive(url: str) -> None:
    assert post(url + COMPLETIONS, json={"prompt": "a"}).status_code == 200
    assert httpx.get(url + "/health", timeout=HANG_S).status_code == 200


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_b32_an_empty_prompt_does_not_end_the_server(url: str, prompt: object) -> None:
    for stream in (False, True):
        assert error_of(post(url + COMPLETIONS, json={"prompt": prompt, "stream": stream}))["param"] == "prompt"
    assert error_of(post(url + CHAT, json={"messages": []}))["param"] == "messages"
    assert_alive(url)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"messages": {}}, openai.BadRequestError, "messages"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -3}, openai.BadRequestError, "max_tokens"),
    ],
)
def test_b33_errors_are_those_of_the_official_client(
    url: str, fields: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=HANG_S) as api:
        body: dict[str, Any] = {"model": "tiny", "messages": [USER], **fields}
        with pytest.raises(error) as raised:
            api.chat.completions.create(**body)
    assert raised.value.param == param
    assert isinstance(raised.value.body, dict) and set(raised.value.body) == {"message", "type", "param", "code"}
    broken = error_of(post(url + CHAT, content=b"{"))
    assert broken["param"] is None and broken["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "so"}],
        [USER, {"role": "assistant", "content": None}],
        [USER, {"role": "assistant", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ],
)
def test_b34_conversations_that_openai_allows_are_answered(url: str, messages: object, stream: bool) -> None:
    response = post(url + CHAT, json={"messages": messages, "stream": stream})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [(["a", "b c"], None), ([5, 6, 7], [[5, 6, 7]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_b35_lists_of_prompts_stream_a_choice_each(
    url: str, service: ScriptedService, codec: TextCodec, prompt: list[Any], ids: list[list[int]] | None
) -> None:
    expected = ids or [codec.encode(text).tolist() for text in prompt]
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, usage, done = events_of(post(url + COMPLETIONS, json=body).text)
    assert done == "[DONE]" and usage["choices"] == []
    assert sorted(asked.prompt.tolist() for asked in service.requests) == sorted(expected)
    for index in range(len(expected)):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == SOME
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
    assert usage["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert usage["usage"]["completion_tokens"] == len(SOME) * len(expected)


@pytest.mark.parametrize("fields", [{"n": 0}, {"stop": [""]}, {"top_p": 1.5}, {"logprobs": -1}])
def test_b36_a_refused_stream_is_one_json_answer_and_its_connection_ends(url: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"prompt": "a", "stream": True, **fields}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    port = urlsplit(url).port
    with socket.create_connection(("127.0.0.1", port or 0), timeout=HANG_S) as connection:
        connection.sendall(head.encode() + body)
        received = b"".join(iter(lambda: connection.recv(65_536), b""))  # until the server closes it
    status, _, answer = received.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400") and b"text/event-stream" not in status
    assert json.loads(answer)["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 30])
def test_b40_all_tokens_of_a_block_are_streamed_and_what_is_held_back_comes_at_the_end(
    serving: Callable[..., Any], codec: TextCodec, max_tokens: int
) -> None:
    with serving(ScriptedService(says(codec.encode("日本🙂é x" * 2).tolist(), block=9))) as url:
        body = {**HELLO, "max_tokens": max_tokens}
        whole = post(url + CHAT, json=body).json()["choices"][0]["message"]["content"]
        events = events_of(post(url + CHAT, json={**body, "stream": True}).text)
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas) == whole and len(whole) > 0
