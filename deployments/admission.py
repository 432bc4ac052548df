"""Refuses at the ingress what the router would refuse, so that saying no costs next to nothing."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from deployments.generation import GenerationService
from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest, MetricsSnapshot, RouterStatus


class FullRouterGate:
    """A generation service in front of the routers, which never hold more than `most_sequences` of clients.

    While so many of this process's own sequences are with them, running or in its queue, one more would be
    refused there; it is refused here instead. With several ingress processes the router refuses the rest.
    """

    def __init__(self, service: GenerationService, most_sequences: int) -> None:
        self._service = service
        self._most = most_sequences
        self.in_flight = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        if self.in_flight >= self._most:
            yield GenerationFailed(429, "overloaded", f"{self._most} sequences run or wait already")
            return
        self.in_flight += 1
        try:
            async with aclosing(self._service.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
        finally:
            self.in_flight -= 1

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`."""
        return await self._service.status(with_worker_stats)

    async def metrics(self) -> MetricsSnapshot:
        """See `GenerationService.metrics`."""
        return await self._service.metrics()
