"""Many completion requests at a fixed concurrency, and what they cost."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.harness import Service

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 20_261_129}
REQUEST_TIMEOUT = httpx.Timeout(600.0)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Answers in the order of the requests, and the seconds that all of them took together."""

    answers: list[dict[str, Any]]
    wall_s: float

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer["usage"]["completion_tokens"] for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second over all streams."""
        return self.completion_tokens / self.wall_s

    @property
    def accepted_length(self) -> float:
        """Committed tokens per verification."""
        verifications = sum(answer["usage"]["speculation"]["verifications"] for answer in self.answers)
        return float(self.completion_tokens / verifications)

    @property
    def token_ids(self) -> list[list[int]]:
        """The ids of each answer's only choice."""
        return [answer["choices"][0]["token_ids"] for answer in self.answers]


def completion_body(prompt: str, sampling: dict[str, Any], speculation: bool, max_tokens: int) -> dict[str, Any]:
    """Return a completion request that also asks for its token ids."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "speculation": {"enabled": speculation},
        **sampling,
    }


def run_load(
    service: Service,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    headers: Sequence[dict[str, str]] | None = None,
) -> LoadResult:
    """Send all bodies, `concurrency` of them in flight together, each with its `headers` if there are any.

    Raises httpx.HTTPStatusError on an error status.
    """
    sent = headers or [{}] * len(bodies)

    async def run() -> list[dict[str, Any]]:
        limit = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=service.url, timeout=REQUEST_TIMEOUT) as client:

            async def ask(body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
                async with limit:
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                answer.raise_for_status()
                return dict(answer.json())

            return list(await asyncio.gather(*map(ask, bodies, sent)))

    began = time.perf_counter()
    answers = asyncio.run(run())
    return LoadResult(answers, time.perf_counter() - began)
