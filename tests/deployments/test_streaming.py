import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.requests import ClientDisconnect

from deployments.streaming import run_while_connected
from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, error_of, events_of, says, streamed_text
from tests.fakes import ScriptedService, in_blocks
from tests.limits import HANG_S, wait_until
from workers.messages import FinishReason, GenerationEvent, GenerationFailed, TokenChunk, token_ids

MIXED = "日本🙂é x"
ASKS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "a"}, CHAT: HELLO}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 30])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_joined_deltas_are_the_text_of_the_whole_answer(
    client_of: Callable[..., Any], codec: TextCodec, path: str, max_tokens: int
) -> None:
    client = client_of(ScriptedService(says(codec.encode("The quick brown fox jumps.").tolist(), block=9)))
    body = {**ASKS[path], "max_tokens": max_tokens}
    whole = client.post(path, json=body).json()["choices"][0]
    events = events_of(client.post(path, json={**body, "stream": True}).text)
    assert streamed_text(events) == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize("block", range(1, 7))
def test_streams_never_split_a_character(client_of: Callable[..., Any], codec: TextCodec, block: int) -> None:
    client = client_of(ScriptedService(says(codec.encode(MIXED).tolist(), block)))
    response = client.post(CHAT, json={**HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert streamed_text(events_of(response.text)) == MIXED


def test_a_chat_streams_its_role_then_content_then_its_finish(client_of: Callable[..., Any], codec: TextCodec) -> None:
    script = says(codec.encode("abcdef").tolist(), 3, FinishReason.STOP)
    events = events_of(client_of(ScriptedService(script)).post(CHAT, json={**HELLO, "stream": True}).text)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "abc"},
        {"content": "def"},
        {},
    ]
    assert len({(event["id"], event["created"], event["object"]) for event in events[:-1]}) == 1


def test_text_held_back_makes_no_events_and_never_shows(client_of: Callable[..., Any], codec: TextCodec) -> None:
    a, b, c = (codec.encode(text) for text in ("one", " S", "TOP"))
    script = [TokenChunk(a, 2), TokenChunk(b, 3), TokenChunk(c, 3, FinishReason.STOP)]
    client = client_of(ScriptedService(lambda _: script))
    events = events_of(client.post(COMPLETIONS, json={"prompt": "x", "stop": " STOP", "stream": True}).text)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["on", "e", ""]
    whole = client.post(COMPLETIONS, json={"prompt": "x", "stop": " STOP", "seed": 7}).json()
    assert whole["choices"][0] == {"index": 0, "text": "one", "logprobs": None, "finish_reason": "stop", "seed": 7}
    assert whole["usage"]["completion_tokens"] == len(a) + len(b) + len(c)


def test_several_prompts_stream_side_by_side(client_of: Callable[..., Any], codec: TextCodec) -> None:
    texts = {len(codec.encode("a")): "first", len(codec.encode("b c")): "second one"}
    service = ScriptedService(lambda r: in_blocks(codec.encode(texts[len(r.prompt)]).tolist(), 2), delay_s=0.002)
    events = events_of(client_of(service).post(COMPLETIONS, json={"prompt": ["a", "b c"], "stream": True}).text)
    assert (streamed_text(events, 0), streamed_text(events, 1)) == ("first", "second one")
    indices = [event["choices"][0]["index"] for event in events[:-1]]
    assert indices != sorted(indices)


@pytest.mark.parametrize(("options", "asked"), [(None, False), ({}, False), ({"include_usage": True}, True)])
def test_the_usage_chunk_comes_only_when_asked(
    client_of: Callable[..., Any], codec: TextCodec, options: dict[str, bool] | None, asked: bool
) -> None:
    client = client_of(ScriptedService(says(codec.encode("hello").tolist(), 2)))
    body = {"prompt": ["a", "b c"]}
    events = events_of(client.post(COMPLETIONS, json={**body, "stream": True, "stream_options": options}).text)
    *chunks, last = events[:-1]
    if asked:
        assert last["choices"] == []
        assert last["usage"] == client.post(COMPLETIONS, json=body).json()["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in [*chunks, last])


def test_a_failure_in_mid_stream_is_an_error_event_without_done(client_of: Callable[..., Any]) -> None:
    script: list[GenerationEvent] = [
        TokenChunk(token_ids([70])),
        GenerationFailed(503, "target_lost", "the target is gone"),
    ]
    events = events_of(client_of(ScriptedService(lambda _: script)).post(CHAT, json={**HELLO, "stream": True}).text)
    assert events[-1] == {
        "error": {"message": "the target is gone", "type": "server_error", "param": None, "code": "target_lost"}
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_fails_before_the_first_token_is_an_ordinary_response(client_of: Callable[..., Any], path: str) -> None:
    client = client_of(ScriptedService(lambda _: [GenerationFailed(429, "overloaded", "queue full")]))
    body = ASKS[path]
    for stream in (True, False):
        response = client.post(path, json={**body, "stream": stream})
        assert error_of(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"


def test_an_unexpected_error_in_mid_stream_tells_no_secrets(client_of: Callable[..., Any]) -> None:
    def script(_: object) -> Any:
        yield TokenChunk(token_ids([70]))
        raise RuntimeError("secret")

    response = client_of(ScriptedService(script)).post(CHAT, json={**HELLO, "stream": True})
    assert events_of(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_a_client_that_leaves_a_stream_cancels_every_choice(serving: Callable[..., Any], prompt: object) -> None:
    service = ScriptedService(lambda _: in_blocks([70] * 5000, 1), delay_s=0.05)
    body = {"prompt": prompt, "max_tokens": 60, "stream": True}
    with serving(service) as url:
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=HANG_S) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
        wait_until(lambda: len(service.cancelled) == len(service.requests) == (1 if prompt == "a" else 3))


def test_a_client_that_leaves_while_nothing_is_sent_cancels(serving: Callable[..., Any]) -> None:
    service = ScriptedService(lambda _: [TokenChunk(token_ids([70]), 0)] * 5000, delay_s=0.05)
    with serving(service) as url:
        with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}, timeout=HANG_S) as response:
            next(response.iter_lines())
        wait_until(lambda: len(service.cancelled) == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_cancels(serving: Callable[..., Any], stream: bool) -> None:
    service = ScriptedService(lambda _: in_blocks([70] * 10, 1), delay_s=2 * HANG_S)
    body = json.dumps({"prompt": ["a", "b"], "stream": stream})
    asking = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    with serving(service) as url:
        with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=HANG_S) as connection:
            connection.sendall(asking.encode())
            wait_until(lambda: len(service.requests) == 2)
        wait_until(lambda: len(service.cancelled) == 2)


def test_cancelling_the_request_task_cancels_the_work() -> None:
    closed = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            closed.append(True)

    async def never() -> Any:
        await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(run_while_connected(never, work()))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())
    assert closed == [True]


def test_a_disconnect_ends_the_work_at_once() -> None:
    async def disconnected() -> Any:
        return {"type": "http.disconnect"}

    async def run() -> None:
        await asyncio.wait_for(run_while_connected(disconnected, asyncio.sleep(600)), HANG_S)

    with pytest.raises(ClientDisconnect):
        asyncio.run(run())
