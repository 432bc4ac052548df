"""The router as Ray sees it: worker handles become links, everything else is handed on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ray.util.metrics import Gauge
from tokenizers import Tokenizer

from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.links.base import LinkChoice
from workers.links.opening import WorkerLinks
from workers.messages import GenerationEvent, GenerationRequest, MetricsSnapshot, RouterStatus, WorkerRegistration
from workers.metrics.gauges import GaugeExport
from workers.router.config import RouterConfig
from workers.router.detached import detached_task
from workers.router.router import Router

logger = logging.getLogger(__name__)
# Ray forgets a gauge that is not set for 20 s.
PUBLISH_EVERY_S = 5.0


class RouterActor:
    """Runs in one Serve replica. Its methods are called through Serve handles, never per round."""

    def __init__(self, config: RouterConfig, tokenizer_json: str, link: LinkChoice = "auto") -> None:
        self._links = WorkerLinks(link)
        tokenizer = Tokenizer.from_str(tokenizer_json)
        self._router = Router(config, lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
        self._publishing: asyncio.Task[None] | None = None

    async def register(self, registration: WorkerRegistration, worker: Any) -> None:
        """Take a worker into service, or do nothing if it is; see `WorkerLinks.link_to` and `Router.register`."""
        self._start_publishing()
        link = await self._links.link_to(registration.worker_id, worker)
        await self._router.register(registration, link)

    async def unregister(self, worker_id: str) -> None:
        """Take a worker out of service; its sequences go on elsewhere."""
        self._router.unregister(worker_id)
        self._links.close(worker_id)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `Router.generate`."""
        events = self._router.generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def close(self) -> None:
        """End every sequence with an error that says so; see `Router.close`."""
        if self._publishing is not None:
            self._publishing.cancel()
        await self._router.close()

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `Router.status`; the reports also say which links are in use."""
        self._start_publishing()
        status = await self._router.status(with_worker_stats)
        reports = (replace(entry, link=self._links.kind_of(entry.registration.worker_id)) for entry in status.workers)
        return replace(status, workers=tuple(reports))

    async def metrics(self) -> MetricsSnapshot:
        """See `Router.metrics`."""
        return await self._router.metrics()

    def _start_publishing(self) -> None:
        """Begin to hand the metrics to Ray, which exports them on each node's own port."""
        if self._publishing is None:
            self._publishing = detached_task(self._publish())

    async def _publish(self) -> None:
        export = GaugeExport(Gauge)
        while True:
            try:
                export.publish(await self._router.metrics())
            except Exception:
                # Nobody's answer may depend on it.
                logger.exception("the metrics could not be handed to Ray")
            await asyncio.sleep(PUBLISH_EVERY_S)
