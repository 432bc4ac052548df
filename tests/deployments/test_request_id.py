"""`x-request-id`: one on every response, the client's where it gave one, and no harm from two that are the same."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.asgi import Exchange, until
from tests.deployments.helpers import CHAT, COMPLETIONS, LIMITS, SOME, error_of, says
from tests.fakes import ScriptedService
from tests.limits import HANG_S

LONGEST = 512


def ids_of(response: Any) -> list[str]:
    return [value for name, value in response.headers.multi_items() if name == "x-request-id"]


@pytest.mark.parametrize("given", ["abc-1", "~ !", "x" * LONGEST, None])
def test_every_response_has_one_request_id(client: Any, given: str | None) -> None:
    headers = {"x-request-id": given} if given else {}
    seen = []
    for response in (
        client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers),
        client.post(COMPLETIONS, json={"prompt": "a", "stream": True}, headers=headers),
        client.post(COMPLETIONS, content=b"{", headers=headers),
        client.get("/nothing", headers=headers),
        client.get("/health", headers=headers),
    ):
        seen += ids_of(response)
    assert len(seen) == 5 and (seen == [given] * 5 if given else len(set(seen)) == 5)


@pytest.mark.parametrize("given", ["x" * (LONGEST + 1), "", "tab\there", "caf\u00e9", "\x7f"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_id_that_fits_no_log_line_is_refused_by_name(
    client: Any, service: ScriptedService, path: str, given: str
) -> None:
    response = client.post(path, json={"prompt": "a"}, headers={"x-request-id": given.encode("latin-1")})
    assert error_of(response)["param"] == "x-request-id"
    assert ids_of(response) != [given] and service.requests == []


def test_behind_a_proxy_that_adds_the_id_it_is_not_there_twice(codec: TextCodec) -> None:
    app = create_app(ScriptedService(says(SOME)), codec, LIMITS, names_requests=False)

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        """Do as Ray Serve's proxy does (RequestIdMiddleware in ray/serve/_private/http_util.py)."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"X-Request-ID", b"mine")]
            await send(message)

        await app(scope, receive, sending)

    async def ids(path: str, method: str) -> list[bytes]:
        exchange = await Exchange([b'{"prompt": "a"}']).run(proxy, path, method, {"x-request-id": "mine"})
        return [value for name, value in exchange.sent[0]["headers"] if name.lower() == b"x-request-id"]

    for path, method in ((COMPLETIONS, "POST"), ("/nothing", "GET"), ("/health", "GET")):
        assert asyncio.run(ids(path, method)) == [b"mine"]


@pytest.mark.parametrize("stream", [False, True])
def test_of_two_requests_with_the_same_id_one_can_be_cancelled(codec: TextCodec, stream: bool) -> None:
    service = ScriptedService(says([70] * 12, 1), delay_s=0.005)
    app = create_app(service, codec, LIMITS)
    body = json.dumps({"prompt": "a", "stream": stream, "max_tokens": 12}).encode()

    async def run() -> None:
        leaving, staying = Exchange([body]), Exchange([body])
        headers = {"x-request-id": "same"}
        tasks = [asyncio.create_task(each.run(app, COMPLETIONS, headers=headers)) for each in (leaving, staying)]
        await until(lambda: len(service.requests) == 2)
        leaving.gone.set()
        await asyncio.wait(tasks)
        assert staying.status == 200 and staying.headers["x-request-id"] == "same"
        if stream:
            assert staying.body.endswith(b"data: [DONE]\n\n")
        await until(lambda: len(service.cancelled) == 1)
        assert len({asked.request_id for asked in service.requests}) == 2

    asyncio.run(asyncio.wait_for(run(), HANG_S))
