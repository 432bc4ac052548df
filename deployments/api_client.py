"""Asking an OpenAI-compatible service: what the commands that are clients share. Knows nothing of Ray."""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from workers.errors import LeadoutError

REQUEST_TIMEOUT = httpx.Timeout(660.0, connect=5.0)
DATA, DONE = b"data:", b"[DONE]"


class ServiceError(LeadoutError):
    """The service cannot be reached, refuses, or answers what it should not; one line says why.

    `status` is that of a refusal, None where there was no answer or a stream broke.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def api_key_from(variable: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key that an environment variable holds; never an option, which other users could see."""
    return environment.get(variable, "").strip() or None


def open_client(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """Return a client of the service at `url`, with or without /v1 at its end. ServiceError if that cannot be."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = url.rstrip("/").removesuffix("/v1")
    try:
        # A proxy that the environment names is for the world outside.
        client = httpx.AsyncClient(
            base_url=base, headers=headers, timeout=REQUEST_TIMEOUT, limits=unlimited, trust_env=False
        )
    except httpx.InvalidURL as error:
        raise ServiceError(f"{url} is not a URL: {error}") from error
    except UnicodeEncodeError as error:
        raise ServiceError("the API key cannot be sent: it has characters that a header cannot hold") from error
    if client.base_url.scheme not in ("http", "https"):
        raise ServiceError(f"{url} is not a URL: it must begin with http:// or https://")
    return client


async def get_json(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return the object at `path`. ServiceError if there is none."""
    return await _json(client, path, client.get(path))


async def post_json(client: httpx.AsyncClient, path: str, body: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the answer to `body`. ServiceError if there is none; a refusal names `what` was refused."""
    return await _json(client, what, client.post(path, json=body))


async def _json(client: httpx.AsyncClient, what: str, asking: Awaitable[httpx.Response]) -> dict[str, Any]:
    try:
        response = await asking
        if response.status_code != httpx.codes.OK:
            raise _refusal(what, response)
        answer = response.json()
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from error
    except ValueError as error:
        raise ServiceError(f"{client.base_url} does not answer {what} with JSON") from error
    if not isinstance(answer, dict):
        raise ServiceError(f"{client.base_url} does not answer {what} with an object")
    return answer


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the name of the first model that the service lists. ServiceError if there is none."""
    models = (await get_json(client, "/v1/models")).get("data")
    try:
        return str(models[0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise ServiceError(f"{client.base_url} lists no models; name one with --model") from error


async def stream_events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the parsed events of a streamed answer, up to `[DONE]`.

    Raises ServiceError for a refusal, an error event, and a stream that breaks off.
    """
    done = False
    try:
        async with _streamed(client, path, body) as response:
            # Read to the very end, or the connection could not be used again.
            async for line in _lines(response):
                data = line.removeprefix(DATA).strip()
                if done or not line.startswith(DATA) or not data:
                    continue  # comments, and the blank lines between events
                done = data == DONE
                if not done:
                    yield _event(data)
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from error
    if not done:
        raise ServiceError(f"{client.base_url} broke the stream off")


def text_of(event: dict[str, Any]) -> str:
    """Return the text that an event adds to its answer, for completions and chats."""
    pieces = []
    for choice in event.get("choices") or ():
        pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
    return "".join(pieces)


@asynccontextmanager
async def _streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise _refusal(path, response)
        yield response


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    # Not `aiter_lines`, which also cuts at characters that JSON strings may hold as they are.
    rest = b""
    async for part in response.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    yield rest


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ServiceError("the stream holds an event that is not JSON") from error
    if not isinstance(event, dict):
        raise ServiceError("the stream holds an event that is no object")
    if event.get("error"):
        raise ServiceError(f"the stream ended with an error: {_message(event, 'no reason given')}")
    return event


def _refusal(what: str, response: httpx.Response) -> ServiceError:
    try:
        reason = _message(response.json(), response.reason_phrase)
    except ValueError:
        reason = response.reason_phrase
    return ServiceError(f"{what} was refused with {response.status_code}: {reason}", response.status_code)


def _message(answer: Any, fallback: str) -> str:
    try:
        return " ".join(str(answer["error"]["message"]).split())
    except (KeyError, TypeError):
        return fallback


def _unreachable(client: httpx.AsyncClient, error: httpx.HTTPError) -> ServiceError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServiceError(f"no service answers at {client.base_url}")
    return ServiceError(f"{client.base_url}: {str(error) or type(error).__name__}")
