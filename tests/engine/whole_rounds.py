"""Whole rounds in one process: router, drafter and verifier with real tiny models; everything but Ray and HTTP."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from deployments.in_process import InProcessLink, registration
from tests.engine.tiny_models import TinyModel
from tests.fakes import byte_tokenizer
from tests.fakes.virtual_time import run_virtually
from tests.limits import HANG_S
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    FinishReason,
    GenerationFailed,
    GenerationRequest,
    SamplingParams,
    SpeculationOptions,
    SpeculationUsage,
    StopConditions,
    WorkerRole,
    WorkerStats,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

T = TypeVar("T")
__all__ = ["InProcessLink", "registration"]


class Outcome:
    """What one request gave."""

    def __init__(self, ids: list[int], reason: FinishReason, usage: SpeculationUsage) -> None:
        self.ids, self.reason, self.usage = ids, reason, usage


async def generate(router: Router, request: GenerationRequest) -> Outcome:
    """Run one request to its end."""
    ids: list[int] = []
    async for event in router.generate(request):
        assert not isinstance(event, GenerationFailed), event
        ids += event.token_ids.tolist()
        if event.finish_reason is not None and event.usage is not None:
            return Outcome(ids, event.finish_reason, event.usage)
    raise AssertionError("the generation ended without a reason")


def run_rounds(test: Callable[[], Awaitable[T]]) -> T:
    """Run a test body in virtual time: what the router decides does not depend on how fast this machine computes."""
    return run_virtually(lambda _: asyncio.wait_for(test(), HANG_S))


def run_all(
    target: Engine,
    drafter: Engine | None,
    requests: Sequence[GenerationRequest],
    config: RouterConfig,
    link: type[InProcessLink] = InProcessLink,
) -> tuple[list[Outcome], list[WorkerStats]]:
    """Run all requests at once; return their outcomes and both workers' stats afterwards."""

    async def run() -> tuple[list[Outcome], list[WorkerStats]]:
        tokenizer = byte_tokenizer().backend_tokenizer
        router = Router(config, lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
        workers: list[Any] = [Verifier(target)]
        await router.register(registration(WorkerRole.TARGET, target), link(workers[0]))
        if drafter is not None:
            workers.append(ModelDrafter(drafter))
            await router.register(registration(WorkerRole.DRAFT, drafter), link(workers[1]))
        outcomes = await asyncio.gather(*(generate(router, request) for request in requests))
        await asyncio.sleep(0.05)
        await router.close()
        return list(outcomes), [worker.stats() for worker in workers]

    return run_rounds(run)


def request(prompt: list[int], sampling: SamplingParams, max_tokens: int = 24, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        "request", token_ids(prompt), sampling, StopConditions(max_tokens), SpeculationOptions(**options)
    )


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths."""
    return [[(7 * index + 3 * position) % 90 + 3 for position in range(3 + 5 * index)] for index in range(count)]


def noisy_copy(model: TinyModel, folder: Path, noise: float) -> Path:
    """The model with slightly other weights: a drafter that is right often but not always."""
    torch.manual_seed(3)
    other = copy.deepcopy(model.reference)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    other.save_pretrained(folder)
    return folder
