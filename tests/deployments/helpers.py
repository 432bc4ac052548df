"""Reading what the HTTP application answers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx

from deployments.http_app import ServingLimits
from tests.fakes import Script, in_blocks, toy_logprobs
from tests.limits import HANG_S
from workers.messages import FinishReason, GenerationRequest, TokenChunk

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SOME = [70, 71, 72]
LIMITS = ServingLimits(
    served_model_name="tiny",
    context_length=64,
    vocabulary_size=257,
    request_timeout_s=30.0,
    max_body_bytes=100_000,
    drafter_names=("scripted",),
    max_draft_tokens=8,
)


def says(ids: list[int], block: int = 3, finish_reason: FinishReason = FinishReason.LENGTH) -> Script:
    """A script that answers every request with `ids`, cut at its budget."""

    def script(request: GenerationRequest) -> list[Any]:
        return with_logprobs(request, in_blocks(ids[: request.stop.max_tokens], block, finish_reason))

    return script


def with_logprobs(request: GenerationRequest, chunks: Sequence[TokenChunk]) -> list[Any]:
    """The chunks with the toy target's log-probabilities, if the request asks for any."""
    if request.logprobs is None:
        return list(chunks)
    tokens = request.prompt.tolist()
    told: list[TokenChunk] = []
    for chunk in chunks:
        start = len(tokens)
        tokens += chunk.token_ids.tolist()
        of_prompt = toy_logprobs(tokens[:start], 1, request.logprobs) if request.prompt_logprobs and not told else None
        told.append(replace(chunk, logprobs=toy_logprobs(tokens, start, request.logprobs), prompt_logprobs=of_prompt))
    return told


def logprobs_of(events: list[Any], index: int = 0) -> dict[str, list[Any]]:
    """The joined log-probabilities of one choice of a stream, as a whole answer has them."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    joined: dict[str, list[Any]] = {}
    for choice in choices:
        if choice["index"] == index and choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                joined.setdefault(name, []).extend(values or [])
    return joined


def events_of(body: str) -> list[Any]:
    """The events of a stream: parsed JSON, or the string "[DONE]"."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def streamed_text(events: list[Any], index: int = 0) -> str:
    """The joined text of one choice of a stream of completions or of a chat."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in mine)


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    return dict(error)


def post(url: str, **content: Any) -> httpx.Response:
    """POST to a server whose machine may be busy."""
    return httpx.post(url, timeout=HANG_S, **content)
