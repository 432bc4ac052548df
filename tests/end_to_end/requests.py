"""Requests to a running service, one at a time or many at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from benchmarks.harness import Service

TIMEOUT = httpx.Timeout(240.0)
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 20_261_129}


def body(prompt: str, sampling: dict[str, Any], speculation: bool = True, max_tokens: int = 48) -> dict[str, Any]:
    """A completion request that also asks for its token ids."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "speculation": {"enabled": speculation},
        **sampling,
    }


def ask_all(service: Service, bodies: Sequence[dict[str, Any]], at_once: int = 8) -> list[dict[str, Any]]:
    """Return the answers to all bodies, `at_once` of them in flight together."""

    async def run() -> list[dict[str, Any]]:
        limit = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT) as client:

            async def ask(request: dict[str, Any]) -> dict[str, Any]:
                async with limit:
                    answer = await client.post("/v1/completions", json=request)
                assert answer.status_code == 200, answer.text
                return dict(answer.json())

            return list(await asyncio.gather(*map(ask, bodies)))

    return asyncio.run(run())


def ids_of(answer: dict[str, Any]) -> list[int]:
    """The token ids of the only choice of an answer."""
    return list(answer["choices"][0]["token_ids"])


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed completion; closing the iterator disconnects."""
    async with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
