"""Requests made from the served description, and what every answer must be, whatever was asked."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema
import schemathesis
from hypothesis import strategies as st
from schemathesis.core import NotSet
from schemathesis.generation import GenerationMode
from starlette.testclient import TestClient

from deployments.openapi import describe
from tests.deployments.helpers import LIMITS, error_of, events_of, with_logprobs
from tests.fakes import in_blocks
from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest

ROOMY = replace(LIMITS, context_length=512)
DESCRIPTION = describe(ROOMY)
FAILURES = {
    429: GenerationFailed(429, "overloaded", "the queue is full"),
    503: GenerationFailed(503, "service_unavailable", "no target is left"),
    504: GenerationFailed(504, "timeout", "the request did not finish in time"),
}
CODES = {failure.status: failure.code for failure in FAILURES.values()}
REFUSALS = {400, 404, 413}


@dataclass(frozen=True, slots=True)
class FuzzedRequest:
    """A request as it is sent; `fits` says whether the description allows it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    fits: bool


@st.composite
def fuzzed_requests(draw: st.DrawFn) -> FuzzedRequest:
    """Draw a request to any endpoint, which the description allows or, as often, does not."""
    fits = draw(st.booleans())
    case = draw(_cases(fits))
    body = case.body
    if fits and draw(st.booleans()):
        body = _mended(body)
    content = body if isinstance(body, bytes) else b"" if isinstance(body, NotSet) else json.dumps(body).encode()
    headers = {name: value for name, value in (case.headers or {}).items() if _sendable(name, value)}
    return FuzzedRequest(case.method, case.formatted_path, headers, content, fits)


@cache
def _cases(fits: bool) -> st.SearchStrategy[Any]:
    schema = schemathesis.openapi.from_dict(DESCRIPTION)
    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    paths = [path for path, methods in DESCRIPTION["paths"].items() if fits or "post" in methods]
    return st.one_of([schema[path].as_strategy(generation_mode=mode) for path in paths])


def _mended(value: Any, name: str = "") -> Any:
    """Return a body with less of what a description cannot rule out, so that more of them are answered."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case list():
            return [_mended(each) for each in value]
        case dict():
            mended = {key: _mended(each, key) for key, each in value.items()}
            return mended | {"content": mended.get("content") or "hi"} if "role" in mended else mended
        case str() if name == "arguments":
            return "{}"
        case _:
            return value


def _sendable(name: str, value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable() and name.lower() != "content-length"


def moody(request: GenerationRequest) -> Iterator[GenerationEvent]:
    """A script that answers, or fails at once or in between, by the length of the prompt."""
    mood = len(request.prompt) % 8
    if mood == 7:
        yield FAILURES[429 if len(request.prompt) % 16 == 7 else 503]
        return
    ids = [70 + index % 20 for index in range(min(request.stop.max_tokens, 12))]
    for index, chunk in enumerate(with_logprobs(request, in_blocks(ids, 3))):
        if mood == 6 and index == 1:
            yield FAILURES[504]
            return
        yield chunk


def send(client: TestClient, request: FuzzedRequest) -> Any:
    """Send a request and return the response."""
    return client.request(request.method, request.path, content=request.body, headers=request.headers)


def check(request: FuzzedRequest, response: Any, made: Mapping[int, str | None] = CODES) -> None:
    """Assert that the answer is sound or an error of OpenAI's shape; `made` has the failures to be expected."""
    status = response.status_code
    if status != 200:
        assert status in REFUSALS | set(made) | ({405} if request.method not in ("GET", "POST") else set())
        error = error_of(response, status)
        assert status not in made or error["code"] == made[status]
        return
    assert response.headers["x-request-id"]
    if response.headers["content-type"].startswith("text/event-stream"):
        last = events_of(response.text)[-1]
        assert last == "[DONE]" or last["error"]["code"] in made.values()
        return
    answered = DESCRIPTION["paths"].get(request.path, {}).get(request.method.lower())
    if answered is not None:
        told = answered["responses"]["200"]["content"]
        if schema := told.get("application/json", {}).get("schema"):
            jsonschema.validate(response.json(), {**schema, "components": DESCRIPTION["components"]})
        else:
            assert response.headers["content-type"].split(";")[0] in told
