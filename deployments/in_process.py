"""Router, drafter and target in one process: all of the product but Ray and HTTP."""

import asyncio
import os
from collections.abc import Sequence

from deployments.text import TextCodec
from workers.answering import answer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.errors import LeadoutError
from workers.messages import (
    GenerationFailed,
    GenerationRequest,
    SpeculationUsage,
    WorkerRegistration,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
)
from workers.router.config import RouterConfig
from workers.router.request_record import RequestRecorder
from workers.router.router import Router
from workers.telemetry.steps import StepSpans
from workers.telemetry.tracing import NO_TRACING, Tracing


class InProcessLink:
    """A link to a real worker in this process, which makes `spans` of its steps."""

    def __init__(self, worker: ModelDrafter | Verifier, spans: StepSpans | None = None) -> None:
        self._worker = worker
        self._spans = spans or StepSpans()

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """Answer as the worker actors do."""
        await asyncio.sleep(0)
        return self._spans.around(message, lambda: answer(self._worker, message))


def registration(role: WorkerRole, engine: Engine, name: str = "tiny") -> WorkerRegistration:
    """Return what the worker actors tell the router."""
    return WorkerRegistration(
        f"{role}-{name}",
        role,
        name,
        (os.getpid(),),
        engine.vocabulary_size,
        engine.context_length,
        engine.block_tokens,
        engine.total_blocks,
    )


async def answer_all(
    target: Engine,
    drafter: Engine,
    codec: TextCodec,
    config: RouterConfig,
    requests: Sequence[GenerationRequest],
    tracing: Tracing = NO_TRACING,
) -> list[SpeculationUsage]:
    """Answer all requests at once and return what speculation did for each. Raises LeadoutError if one fails."""
    router = Router(
        config,
        lambda prompt: IncrementalDetokenizer(codec.backend, prompt.tolist()),
        recorder=RequestRecorder(config.verification, tracing),
    )
    for name, role, engine in (("target", WorkerRole.TARGET, target), ("drafter", WorkerRole.DRAFT, drafter)):
        worker = Verifier(engine) if role is WorkerRole.TARGET else ModelDrafter(engine)
        await router.register(registration(role, engine, name), InProcessLink(worker, StepSpans(tracing, name)))

    async def generate(request: GenerationRequest) -> SpeculationUsage:
        async for event in router.generate(request):
            if isinstance(event, GenerationFailed):
                raise LeadoutError(event.message)
            if event.finish_reason is not None and event.usage is not None:
                return event.usage
        raise LeadoutError("a generation ended without usage")

    try:
        return list(await asyncio.gather(*map(generate, requests)))
    finally:
        await router.close()
