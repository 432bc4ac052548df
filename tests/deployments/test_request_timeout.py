from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.helpers import CHAT, COMPLETIONS, HELLO, error_of, events_of
from tests.fakes import ScriptedService
from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest, TokenChunk, token_ids

ASKS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "a", "max_tokens": 20}, CHAT: HELLO}


def times_out(*tokens: int) -> Callable[[GenerationRequest], list[GenerationEvent]]:
    """A script that fails as the router does at a deadline, after some tokens."""

    def script(request: GenerationRequest) -> list[GenerationEvent]:
        message = f"the request did not finish within {request.timeout_s:g} s"
        return [*(TokenChunk(token_ids([token])) for token in tokens), GenerationFailed(504, "timeout", message)]

    return script


@pytest.mark.parametrize(
    ("given", "timeout_s"),
    [("5", 5.0), ("0.25", 0.25), ("0.30000000000000004", 0.1 + 0.2), ("1e-05", 1e-5), ("30", 30.0), (None, 30.0)],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_header_shortens_the_deadline(
    client: Any, service: ScriptedService, path: str, given: str | None, timeout_s: float
) -> None:
    headers = {"x-request-timeout": given} if given else {}
    assert client.post(path, json=ASKS[path], headers=headers).status_code == 200
    assert service.requests[-1].timeout_s == timeout_s


@pytest.mark.parametrize(
    "given", ["0", "-1", "30.1", "1e9", "1e-999", "inf", "nan", "soon", "", "5s", " ", "0x5", "٣", "9" * 400, "1,2"]
)
def test_a_time_out_that_is_none_or_too_long_is_refused_by_name(
    client: Any, service: ScriptedService, given: str
) -> None:
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        error = error_of(client.post(COMPLETIONS, json=body, headers={"x-request-timeout": given.encode()}))
        assert error["param"] == "x-request-timeout" and error["message"].startswith("x-request-timeout")
        assert "30" in error["message"]
    assert not service.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_that_runs_out_of_time_says_how_much_it_had(client_of: Callable[..., Any], path: str) -> None:
    client = client_of(ScriptedService(times_out(70, 71)))
    error = error_of(client.post(path, json=ASKS[path], headers={"x-request-timeout": "1.5"}), 504)
    assert (error["code"], error["type"]) == ("timeout", "server_error") and "1.5 s" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_runs_out_of_time_ends_with_the_error_and_no_reason(
    client_of: Callable[..., Any], path: str
) -> None:
    client = client_of(ScriptedService(times_out(70, 71)))
    body = {**ASKS[path], "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(client.post(path, json=body, headers={"x-request-timeout": "1.5"}).text)
    *chunks, last = events
    assert last["error"]["code"] == "timeout" and "1.5 s" in last["error"]["message"]
    assert chunks and all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_stream_that_runs_out_of_time_before_its_first_token_is_an_ordinary_response(
    client_of: Callable[..., Any],
) -> None:
    client = client_of(ScriptedService(times_out()))
    response = client.post(COMPLETIONS, json={"prompt": "a", "stream": True}, headers={"x-request-timeout": "2"})
    assert "2 s" in error_of(response, 504)["message"]
