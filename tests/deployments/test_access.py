"""Who is let in, how much at once, and bodies that are too large or never end."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.access import AccessRules
from deployments.api_keys import ApiKey, digest_of
from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.asgi import Exchange, until
from tests.deployments.helpers import COMPLETIONS, LIMITS, SOME, says
from tests.fakes import ScriptedService
from tests.fakes.virtual_time import run_virtually
from tests.limits import HANG_S

KEYS = (ApiKey("alice", digest_of("key-a")), ApiKey("bob", digest_of("key-b")))
BODY = json.dumps({"prompt": "ab", "max_tokens": 3}).encode()
STREAM = json.dumps({"prompt": "ab", "max_tokens": 3, "stream": True}).encode()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def run(test: Awaitable[None]) -> None:
    run_virtually(lambda _: asyncio.wait_for(test, HANG_S))


class HeldService(ScriptedService):
    """A scripted service whose answers go on only once `release` is set."""

    def __init__(self) -> None:
        super().__init__(says(SOME))
        self.release = asyncio.Event()

    async def generate(self, request: Any) -> Any:
        """See ScriptedService."""
        stream = super().generate(request)
        async for event in stream:
            await self.release.wait()
            yield event


@pytest.fixture
def app_of(codec: TextCodec) -> Callable[..., Any]:
    def make(service: ScriptedService | None = None, max_body_bytes: int = 100_000, **rules: Any) -> Any:
        limits = replace(LIMITS, access=AccessRules(**rules), max_body_bytes=max_body_bytes)
        return create_app(service or ScriptedService(says(SOME)), codec, limits)

    return make


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer nope", "Bearer key-", "Basic key-a", "key-a", "Bearer key-a key-b"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/status", "/tokenize", "/detokenize", "/v1/nothing"])
def test_without_a_known_key_nothing_is_read_or_told(
    app_of: Callable[..., Any], authorization: str | None, path: str
) -> None:
    service = ScriptedService(says(SOME))
    headers = {} if authorization is None else {"authorization": authorization}

    async def test() -> None:
        exchange = await Exchange([BODY]).run(app_of(service, keys=KEYS), path, headers=headers)
        error = exchange.error(401)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert exchange.headers["www-authenticate"] == "Bearer"
        assert exchange.read == 0 and not service.requests
        assert "key-" not in error["message"] and "nope" not in error["message"]

    run(test())


@pytest.mark.parametrize("authorization", ["Bearer key-a", "bearer key-b", "BEARER   key-b "])
def test_any_known_key_is_let_in(app_of: Callable[..., Any], authorization: str) -> None:
    async def test() -> None:
        headers = {"authorization": authorization}
        for body in (BODY, STREAM):
            exchange = await Exchange([body]).run(app_of(keys=KEYS), COMPLETIONS, headers=headers)
            assert exchange.status == 200, exchange.body

    run(test())


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_probes_need_no_key(app_of: Callable[..., Any], root_path: str) -> None:
    async def test() -> None:
        app = app_of(keys=KEYS)
        for path in ("/health", "/ready"):
            exchange = await Exchange().run(app, path, "GET", root_path=root_path)
            assert exchange.status == 200, exchange.body
        for path in ("/status", "/health/", "//health", "/v1/health"):
            (await Exchange().run(app, path, "GET", root_path=root_path)).error(401)

    run(test())


def test_without_keys_everybody_is_let_in(app_of: Callable[..., Any]) -> None:
    async def test() -> None:
        for headers in ({}, bearer("whatever")):
            assert (await Exchange([BODY]).run(app_of(), COMPLETIONS, headers=headers)).status == 200

    run(test())


def test_no_log_line_holds_a_key(app_of: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    def script(_: object) -> Any:
        raise RuntimeError("a bug")

    async def test() -> None:
        app = app_of(ScriptedService(script), keys=KEYS)
        (await Exchange([BODY]).run(app, COMPLETIONS, headers=bearer("key-a"))).error(500)
        (await Exchange([BODY]).run(app, COMPLETIONS, headers=bearer("wrong-key"))).error(401)

    with caplog.at_level(logging.DEBUG):
        run(test())
    assert "failed unexpectedly" in caplog.text
    assert "key-a" not in caplog.text and "wrong-key" not in caplog.text


# --- requests in progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_a_key_at_its_limit_is_refused_before_its_body_is_read_and_others_are_not(
    app_of: Callable[..., Any], body: bytes
) -> None:
    async def test() -> None:
        service = HeldService()
        app = app_of(service, keys=KEYS, max_concurrent_per_key=2)
        held = [asyncio.create_task(Exchange([body]).run(app, COMPLETIONS, headers=bearer("key-a"))) for _ in range(2)]
        await until(lambda: len(service.requests) == 2)
        refused = await Exchange([body]).run(app, COMPLETIONS, headers=bearer("key-a"))
        error = refused.error(429)
        assert error["type"] == "overloaded_error" and error["code"] == "too_many_requests" and "2" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1 and refused.read == 0
        assert (await Exchange().run(app, "/status", "GET", headers=bearer("key-a"))).status == 200
        other = asyncio.create_task(Exchange([body]).run(app, COMPLETIONS, headers=bearer("key-b")))
        await until(lambda: len(service.requests) == 3)
        service.release.set()
        assert [(await task).status for task in (*held, other)] == [200] * 3
        assert (await Exchange([body]).run(app, COMPLETIONS, headers=bearer("key-a"))).status == 200

    run(test())


def test_without_keys_the_limit_is_that_of_all_together(app_of: Callable[..., Any]) -> None:
    async def test() -> None:
        service = HeldService()
        app = app_of(service, max_concurrent_per_key=1)
        held = asyncio.create_task(Exchange([BODY]).run(app, COMPLETIONS, headers=bearer("x")))
        await until(lambda: len(service.requests) == 1)
        (await Exchange([BODY]).run(app, COMPLETIONS, headers=bearer("y"))).error(429)
        service.release.set()
        assert (await held).status == 200

    run(test())


def test_room_comes_back_from_clients_that_leave_and_requests_that_fail(app_of: Callable[..., Any]) -> None:
    async def test() -> None:
        service = HeldService()
        app = app_of(service, max_concurrent_per_key=1)
        for body in (BODY, STREAM):
            exchange = Exchange([body])
            left = asyncio.create_task(exchange.run(app, COMPLETIONS))
            asked = len(service.requests) + 1
            await until(lambda asked=asked: len(service.requests) == asked)
            exchange.gone.set()
            await left
        (await Exchange([b"{"]).run(app, COMPLETIONS)).error(400)
        service.release.set()
        assert (await Exchange([BODY]).run(app, COMPLETIONS)).status == 200

    run(test())


def test_a_stream_shows_its_first_event_while_the_rest_is_still_to_come(app_of: Callable[..., Any]) -> None:
    class FirstThenHeld(HeldService):
        async def generate(self, request: Any) -> Any:
            stream = ScriptedService.generate(self, request)
            yield await anext(stream)
            await self.release.wait()
            async for event in stream:
                yield event

    async def test() -> None:
        service = FirstThenHeld()
        service.script = says([70, 71, 72, 73], block=1)
        exchange = Exchange([json.dumps({"prompt": "ab", "max_tokens": 4, "stream": True}).encode()])
        app = app_of(service, keys=KEYS, max_concurrent_per_key=1)
        task = asyncio.create_task(exchange.run(app, COMPLETIONS, headers=bearer("key-a")))
        await until(lambda: b"data: " in exchange.body)
        assert b"[DONE]" not in exchange.body and not task.done()
        service.release.set()
        await task
        assert exchange.body.endswith(b"data: [DONE]\n\n")

    run(test())


# --- bodies -------------------------------------------------------------------------------------------------


def test_a_body_without_length_is_cut_off_where_it_passes_the_limit(app_of: Callable[..., Any]) -> None:
    async def test() -> None:
        exchange = await Exchange([b"x" * 10_000] * 100).run(app_of(), COMPLETIONS)
        assert exchange.error(413)["code"] == "request_too_large"
        assert exchange.read == 11  # the limit is 100,000 bytes

    run(test())


def test_a_body_that_announces_too_much_is_not_read(app_of: Callable[..., Any]) -> None:
    async def test() -> None:
        headers = {"content-length": "100001"}
        exchange = await Exchange([b"x"] * 3).run(app_of(), COMPLETIONS, headers=headers)
        assert exchange.error(413)["code"] == "request_too_large" and exchange.read == 0

    run(test())


@pytest.mark.parametrize(("parts", "pause_s"), [([b'{"prompt": '], 0.0), ([b" "] * 10_000, 0.01)])
def test_a_body_that_does_not_end_in_time_is_refused(
    app_of: Callable[..., Any], parts: list[bytes], pause_s: float
) -> None:
    async def test() -> None:
        exchange = await Exchange(parts, whole=False, pause_s=pause_s).run(app_of(body_timeout_s=0.2), COMPLETIONS)
        assert exchange.error(408)["code"] == "request_timeout" and exchange.headers["connection"] == "close"
        assert exchange.read < 1_000

    run(test())


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_an_answer_may_take_longer_than_a_body(app_of: Callable[..., Any], body: bytes) -> None:
    async def test() -> None:
        service = ScriptedService(says(SOME, block=1), delay_s=0.1)
        exchange = await Exchange([body]).run(app_of(service, body_timeout_s=0.15), COMPLETIONS)
        assert exchange.status == 200, exchange.body

    run(test())


# --- retry-after --------------------------------------------------------------------------------------------


def test_what_may_pass_says_when_to_try_again(app_of: Callable[..., Any]) -> None:
    async def test() -> None:
        app = app_of(ScriptedService(says(SOME), workers=()))
        for path in ("/health", "/ready"):
            exchange = await Exchange().run(app, path, "GET")
            assert exchange.status == 503 and int(exchange.headers["retry-after"]) >= 1

    run(test())
