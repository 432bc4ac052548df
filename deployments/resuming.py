"""Generation that outlives the router: what was told of a sequence is enough for another router to go on with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from deployments.generation import GenerationService
from workers.errors import RouterLostError, UnavailableError
from workers.messages import (
    NO_TOKENS,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    MetricsSnapshot,
    Resumption,
    RouterStatus,
    SpeculationUsage,
    TokenChunk,
    TokenIds,
)

RESUME_TIMEOUT_S = 60.0
"""How long the next router may take to come."""
MOST_FUTILE_RESUMPTIONS = 2
"""A request that loses one router after the other, and gets no token from any, may well be what ends them."""
STATUS_TIMEOUT_S = 2.0
POLL_S = 0.1


@dataclass(slots=True)
class Told:
    """What the events of a sequence have told so far, and how many routers were lost since the last of them."""

    request: GenerationRequest
    pieces: list[TokenIds] = field(default_factory=list)
    usage: SpeculationUsage = field(default_factory=SpeculationUsage)
    scored_prompt_tokens: int = 0
    losses: int = 0

    def note(self, chunk: TokenChunk) -> None:
        """Remember what `chunk` tells."""
        self.pieces.append(chunk.token_ids)
        self.usage = chunk.usage or self.usage
        self.scored_prompt_tokens += len(chunk.prompt_logprobs or ())
        self.losses = 0

    def next_request(self, timeout_s: float) -> GenerationRequest:
        """Return what to ask the next router."""
        committed = np.concatenate([NO_TOKENS, *self.pieces]).astype(np.int32)
        known = Resumption(committed, self.usage, self.scored_prompt_tokens)
        return replace(self.request, resumption=known, timeout_s=timeout_s)


class ResumingService:
    """A generation service that outlives routers: clients see a pause, then the very text they would have had anyway.

    Seed and tokens are all that the text depends on, so nothing but them has to survive.
    """

    def __init__(self, service: GenerationService, resume_timeout_s: float = RESUME_TIMEOUT_S) -> None:
        self._service = service
        self._resume_timeout_s = resume_timeout_s

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + request.timeout_s
        told, asked = Told(request), request
        while True:
            try:
                async with aclosing(self._service.generate(asked)) as events:  # type: ignore[type-var]
                    async for event in events:
                        if isinstance(event, TokenChunk):
                            told.note(event)
                        yield event
                return
            except RouterLostError as lost:
                told.losses += 1
                failure = await self._wait_for_router(told, lost, deadline)
            if failure is not None:
                yield failure
                return
            asked = told.next_request(deadline - clock())

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`."""
        return await self._service.status(with_worker_stats)

    async def metrics(self) -> MetricsSnapshot:
        """See `GenerationService.metrics`."""
        return await self._service.metrics()

    async def _wait_for_router(self, told: Told, lost: RouterLostError, deadline: float) -> GenerationFailed | None:
        """Return None when a router answers, or why the sequence ends."""
        if told.losses > MOST_FUTILE_RESUMPTIONS:
            return _unavailable(f"{told.losses} routers in a row were lost with this request: {lost.message}")
        clock = asyncio.get_running_loop().time
        give_up = min(deadline, clock() + self._resume_timeout_s)
        while clock() < give_up:
            with suppress(UnavailableError, TimeoutError):
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    await self._service.status()
                    return None
            await asyncio.sleep(POLL_S)
        if give_up == deadline:
            return GenerationFailed(504, "timeout", f"the request did not finish within {told.request.timeout_s:g} s")
        return _unavailable(f"no router came back within {self._resume_timeout_s:g} s: {lost.message}")


def _unavailable(message: str) -> GenerationFailed:
    return GenerationFailed(503, "service_unavailable", message)
