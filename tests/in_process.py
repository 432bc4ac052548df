"""The whole application in one process, with real tiny models and without Ray: router, workers and HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from deployments.generation import GenerationService
from deployments.http_app import ServingLimits, create_app
from deployments.in_process import InProcessLink, registration
from deployments.text import TextCodec
from tests.engine.tiny_models import TinyModel, save_model
from tests.engine.whole_rounds import noisy_copy
from tests.fakes import byte_tokenizer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.errors import RouterLostError
from workers.messages import (
    GenerationEvent,
    GenerationRequest,
    MetricsSnapshot,
    RouterStatus,
    WorkerRegistration,
    WorkerRole,
)
from workers.router.config import RouterConfig
from workers.router.request_record import RequestRecorder
from workers.router.router import Router
from workers.telemetry.steps import StepSpans
from workers.telemetry.tracing import NO_TRACING, Tracing

MODEL_CONTEXT = 160
VOCABULARY = 257
DRAFTER_NOISE = {"own": 0.0, "noisy": 0.02, "random": 3.0}
"""Drafters that are always right, often right and hardly ever right, by the noise added to the target's weights."""


def save_byte_llama(folder: Path) -> TinyModel:
    """Save a tiny model over the byte tokenizer, with padded embeddings."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY + 7, max_position_embeddings=MODEL_CONTEXT, bos_token_id=0, eos_token_id=0, **sizes
    )
    model = save_model(config, folder)
    byte_tokenizer().save_pretrained(folder)
    return TinyModel(folder, model)


def save_drafters(model: TinyModel, folder: Path) -> dict[str, Path]:
    """Save a drafter of each kind of DRAFTER_NOISE; return their folders by name."""
    folders = {name: noisy_copy(model, folder / name, noise) for name, noise in DRAFTER_NOISE.items()}
    for saved in folders.values():
        byte_tokenizer().save_pretrained(saved)
    return folders


def load(folder: Path, **options: Any) -> Engine:
    """Load an engine with a small pool; keyword arguments override its configuration."""
    settings: dict[str, Any] = {"model": str(folder), "device": "cpu", "kv_cache_gib": 0.01} | options
    return Engine.load(EngineConfig(**settings))


class InProcessService:
    """The router and its workers as the ingress sees them; they start in the event loop of the first request."""

    def __init__(
        self,
        target: Engine,
        drafters: Mapping[str, Engine],
        codec: TextCodec,
        config: RouterConfig,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.target, self.drafters, self.tracing = target, drafters, tracing
        self._codec, self._config = codec, config
        self.router = self._new_router()
        self._links: list[tuple[WorkerRegistration, InProcessLink]] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        await self._start()
        async for event in self.router.generate(request):
            yield event

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`."""
        await self._start()
        return await self.router.status(with_worker_stats)

    async def metrics(self) -> MetricsSnapshot:
        """See `GenerationService.metrics`."""
        await self._start()
        return await self.router.metrics()

    def _new_router(self) -> Router:
        return Router(
            self._config,
            lambda prompt: IncrementalDetokenizer(self._codec.backend, prompt.tolist()),
            recorder=RequestRecorder(self._config.verification, self.tracing),
        )

    async def _start(self) -> None:
        if self._links:
            return
        self._links.append(
            (
                registration(WorkerRole.TARGET, self.target),
                InProcessLink(Verifier(self.target), StepSpans(self.tracing, "target")),
            )
        )
        for name, engine in self.drafters.items():
            link = InProcessLink(ModelDrafter(engine), StepSpans(self.tracing, name))
            self._links.append((registration(WorkerRole.DRAFT, engine, name), link))
        await self._register_all()

    async def _register_all(self) -> None:
        for worker, link in self._links:
            await self.router.register(worker, link)


class MortalService(InProcessService):
    """Loses its router after every `life` events, as if its process were killed; a new one finds the same workers."""

    life = 0
    losses = 0
    _events = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`. RouterLostError when the router is lost."""
        await self._start()
        router = self.router
        events = router.generate(request)
        while True:
            waiting = asyncio.ensure_future(anext(events, None))
            while not waiting.done() and router is self.router:
                await asyncio.wait([waiting], timeout=0.005)
            if router is not self.router:
                waiting.cancel()
                raise RouterLostError("the router was killed")
            event = waiting.result()
            if event is None:
                return
            self._events += 1
            yield event
            if self.life and self._events % self.life == 0 and router is self.router:
                await self._lose_router()

    async def _lose_router(self) -> None:
        # A process that is killed tells nobody: neither its clients nor its workers.
        for task in self.router._lane_tasks.values():
            task.cancel()
        self.losses += 1
        self.router = self._new_router()
        await self._register_all()


def application(
    service: InProcessService,
    codec: TextCodec,
    max_draft_tokens: int = 8,
    around: Callable[[GenerationService], GenerationService] | None = None,
) -> Any:
    """Return the HTTP application over `service`, or over what `around` makes of it."""
    limits = ServingLimits(
        served_model_name="tiny",
        context_length=service.target.context_length,
        vocabulary_size=codec.vocabulary_size,
        drafter_names=tuple(service.drafters),
        max_draft_tokens=max_draft_tokens,
    )
    return create_app(around(service) if around else service, codec, limits, tracing=service.tracing)
