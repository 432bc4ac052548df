"""The router as Ray sees it: worker handles become links, everything else is handed on."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.links.base import LinkChoice
from workers.links.opening import WorkerLinks
from workers.messages import GenerationEvent, GenerationRequest, RouterStatus, WorkerRegistration
from workers.router.config import RouterConfig
from workers.router.record import Recorder
from workers.router.router import Router
from workers.telemetry.config import BY_ENVIRONMENT, TelemetryConfig
from workers.telemetry.request_log import WITHOUT_TEXT, RequestLogConfig, open_request_log
from workers.telemetry.setup import set_up_tracing


class RouterActor:
    """Runs in one Serve replica. Its methods are called through Serve handles, never per round."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer_json: str,
        link: LinkChoice = "auto",
        telemetry: TelemetryConfig = BY_ENVIRONMENT,
        request_log: RequestLogConfig = WITHOUT_TEXT,
    ) -> None:
        self._links = WorkerLinks(link)
        tokenizer = Tokenizer.from_str(tokenizer_json)
        log = open_request_log(request_log, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        recorder = Recorder(config.verification, set_up_tracing(telemetry, "router"), log)
        self._router = Router(
            config, lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()), recorder=recorder
        )

    async def register(self, registration: WorkerRegistration, worker: Any) -> None:
        """Take a worker into service, or do nothing if it is; see `WorkerLinks.link_to` and `Router.register`."""
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
        await self._router.close()

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `Router.status`; the reports also say which links are in use."""
        status = await self._router.status(with_worker_stats)
        reports = (replace(entry, link=self._links.kind_of(entry.registration.worker_id)) for entry in status.workers)
        return replace(status, workers=tuple(reports))
