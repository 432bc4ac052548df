"""A generation service that plays a script."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from workers.messages import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    MetricsSnapshot,
    RouterStatus,
    SpeculationUsage,
    TokenChunk,
    WorkerRegistration,
    WorkerReport,
    WorkerRole,
    token_ids,
)

Script = Callable[[GenerationRequest], Sequence[GenerationEvent]]
TARGET = WorkerReport(WorkerRegistration("target-0", WorkerRole.TARGET, "tiny", (1,), 257, 64, 16, 8), None)


def in_blocks(ids: Sequence[int], block: int, finish_reason: FinishReason = FinishReason.LENGTH) -> list[TokenChunk]:
    """Return `ids` as chunks of `block` tokens, the last with a finish reason and a plausible usage."""
    pieces = [token_ids(list(ids[start : start + block])) for start in range(0, max(len(ids), 1), block)]
    usage = SpeculationUsage(
        verifications=len(pieces),
        draft_tokens=len(pieces) * block,
        accepted_tokens=len(ids) - len(pieces),
        committed_tokens=len(ids),
        accepted_per_position=(len(pieces),) * min(block, 2),
        drafter="scripted",
    )
    return [TokenChunk(piece) for piece in pieces[:-1]] + [TokenChunk(pieces[-1], None, finish_reason, usage)]


@dataclass
class ScriptedService:
    """Plays `script(request)` with `delay_s` before each event; records what it was asked and what was cancelled."""

    script: Script
    delay_s: float = 0.0
    workers: tuple[WorkerReport, ...] = (TARGET,)
    status_delay_s: float = 0.0
    loading: bool = False
    draining: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield the script's events; note the request as cancelled if it is closed before their end."""
        self.requests.append(request)
        ended = False
        try:
            for event in self.script(request):
                await asyncio.sleep(self.delay_s)
                # A consumer that closes at the last event has what it wants: that is no cancellation.
                ended = not isinstance(event, TokenChunk) or event.finish_reason is not None
                yield event
            ended = True
        finally:
            if not ended:
                await asyncio.sleep(0.001)  # telling a router takes a while, even to one that is being cancelled
                self.cancelled.append(request.request_id)

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """Return a status with `workers`, after `status_delay_s`."""
        await asyncio.sleep(self.status_delay_s)
        return RouterStatus(0, 0, self.workers, loading=self.loading, draining=self.draining)

    async def metrics(self) -> MetricsSnapshot:
        """Return no series, after `status_delay_s`."""
        await asyncio.sleep(self.status_delay_s)
        return MetricsSnapshot(())
