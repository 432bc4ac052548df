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
from workers.messages import (
    ROUTER_LABEL,
    GenerationEvent,
    GenerationRequest,
    MetricsSnapshot,
    RouterStatus,
    WorkerRegistration,
    WorkerReport,
)
from workers.metrics.gauges import GaugeExport
from workers.router.config import RouterConfig
from workers.router.detached import detached_task
from workers.router.heartbeats import Heartbeats
from workers.router.request_record import RequestRecorder
from workers.router.router import Router
from workers.telemetry.config import BY_ENVIRONMENT, TelemetryConfig
from workers.telemetry.request_log import WITHOUT_TEXT, RequestLogConfig, open_request_log
from workers.telemetry.setup import set_up_tracing

logger = logging.getLogger(__name__)
# Ray forgets a gauge that is not set for 20 s.
PUBLISH_EVERY_S = 5.0


class RouterActor:
    """Runs in one Serve replica. Its methods are called through Serve handles, never per round."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer_json: str,
        link: LinkChoice = "auto",
        telemetry: TelemetryConfig = BY_ENVIRONMENT,
        request_log: RequestLogConfig = WITHOUT_TEXT,
        name: str | None = None,
    ) -> None:
        """With a `name`, which tells it from other routers, what it hands to Ray has that as a label."""
        self._links = WorkerLinks(link)
        self._heartbeats = Heartbeats()
        tokenizer = Tokenizer.from_str(tokenizer_json)
        log = open_request_log(request_log, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        recorder = RequestRecorder(config.verification, set_up_tracing(telemetry, "router"), log)
        self._router = Router(
            config, lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()), recorder=recorder
        )
        self._name = name
        self._publishing: asyncio.Task[None] | None = None

    async def register(self, registration: WorkerRegistration, worker: Any) -> None:
        """Take a worker into service, or only note that it is alive; see `WorkerLinks.link_to`, `Router.register`."""
        self._start_publishing()
        self._heartbeats.beat(registration.worker_id)
        link = await self._links.link_to(registration.worker_id, worker)
        await self._router.register(registration, link)

    async def unregister(self, worker_id: str) -> None:
        """Take a worker out of service; its sequences go on elsewhere."""
        self._router.unregister(worker_id)
        self._links.close(worker_id)
        self._heartbeats.forget(worker_id)

    async def drain(self, worker_id: str) -> int:
        """See `Router.drain`. Its supervisor has ended the beats; asking to drain is one."""
        self._heartbeats.beat(worker_id)
        return self._router.drain(worker_id)

    async def drain_service(self) -> int:
        """See `Router.drain_service`."""
        return self._router.drain_service()

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
        """See `Router.status`; the reports also say which links are in use, and who has fallen silent."""
        self._start_publishing()
        status = await self._router.status(with_worker_stats)
        return replace(status, workers=tuple(map(self._with_liveness, status.workers)))

    def _with_liveness(self, report: WorkerReport) -> WorkerReport:
        worker_id = report.registration.worker_id
        silent = self._heartbeats.is_silent(worker_id)
        return replace(report, link=self._links.kind_of(worker_id), silent=silent)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve again and again, and handed to the policies: see `Router.load`."""
        return self._router.load().as_metrics()

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
                snapshot = await self._router.metrics()
                export.publish(snapshot if self._name is None else snapshot.labelled(ROUTER_LABEL, self._name))
            except Exception:
                # Nobody's answer may depend on it.
                logger.exception("the metrics could not be handed to Ray")
            await asyncio.sleep(PUBLISH_EVERY_S)
