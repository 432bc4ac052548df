"""Requests to a running service, one at a time or many at once."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from benchmarks.harness import Service
from benchmarks.load import GREEDY, SEEDED, completion_body, run_load

__all__ = ["GREEDY", "SEEDED", "TIMEOUT", "ask_all", "body", "ids_of", "stream"]

TIMEOUT = httpx.Timeout(240.0)


def body(prompt: str, sampling: dict[str, Any], speculation: bool = True, max_tokens: int = 48) -> dict[str, Any]:
    """A completion request that also asks for its token ids."""
    return completion_body(prompt, sampling, speculation, max_tokens)


def ask_all(service: Service, bodies: Sequence[dict[str, Any]], at_once: int = 8) -> list[dict[str, Any]]:
    """Return the answers to all bodies, `at_once` of them in flight together."""
    return run_load(service, bodies, at_once).answers


def ids_of(answer: dict[str, Any]) -> list[int]:
    """The token ids of the only choice of an answer."""
    return list(answer["choices"][0]["token_ids"])


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed completion; closing the iterator disconnects."""
    async with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, f"{chunk['error']}; the service: {await status_text(client)}"
                yield chunk


async def status_text(client: httpx.AsyncClient) -> str:
    """What the service says of itself, if it still answers: it may be on its way out, or the reason for the error."""
    try:
        return (await client.get("/status")).text
    except httpx.HTTPError as error:
        return f"no answer ({type(error).__name__})"
