"""The real router over synthetic workers on emulated devices, in one process, and requests to it that check every id.

Text, acceptance and device times are made up; the router, its rounds and what it costs are real.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.emulated.drafter import SyntheticDrafter
from workers.emulated.language import AcceptanceProfile, SyntheticLanguage, mix, synthetic_text
from workers.emulated.sequences import SyntheticSize
from workers.emulated.stretched import EmulatedDrafter, EmulatedTarget
from workers.emulated.target import SyntheticTarget
from workers.emulated.thread_link import ThreadLink
from workers.emulated.timing import DrafterTiming, EmulatedUsage, TargetTiming
from workers.messages import (
    GenerationFailed,
    GenerationRequest,
    RoundTotals,
    SamplingParams,
    SpeculationOptions,
    SpeculationUsage,
    StopConditions,
    TokenIds,
    WorkerRegistration,
    WorkerRole,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

PROMPT_TOKENS = 16
DRAFTED = SpeculationOptions()
TARGET_TIMING, DRAFTER_TIMING = TargetTiming(), DrafterTiming()
LANGUAGE = SyntheticLanguage()
SIZE = SyntheticSize()
AS_SERVED: Mapping[str, Any] = {
    "draft_length_policy": "goodput",
    "max_draft_tokens": 8,
    "draft_ahead": True,
    "max_cohorts": 2,
    "bench_drafters": True,
    "max_running_sequences": 1_024,
    "max_waiting_sequences": 4_096,
}
"""What a deployment does by default, with room for every load here."""


class WrongTextError(RuntimeError):
    """A request's ids are not those of plain decoding, or it failed: no figure of the run means anything."""


# --- the service --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrafterLayout:
    """One synthetic drafter on an emulated device."""

    profile: AcceptanceProfile
    name: str = "synthetic"
    timing: DrafterTiming = DRAFTER_TIMING


@dataclass(frozen=True, slots=True)
class ServiceLayout:
    """Targets that are alike, and drafters; all workers have the same `size`."""

    drafters: tuple[DrafterLayout, ...]
    targets: int = 1
    target_timing: TargetTiming = TARGET_TIMING
    hop_ms: float = 0.0
    size: SyntheticSize = SIZE


def router_config(**overrides: Any) -> RouterConfig:
    """Return the default configuration of a deployment with `overrides`."""
    return RouterConfig(**{**AS_SERVED, **overrides})


def registration(role: WorkerRole, worker_id: str, name: str, size: SyntheticSize = SIZE) -> WorkerRegistration:
    """Return what a synthetic worker says of itself."""
    sizes = (LANGUAGE.vocabulary_size, size.context_length, size.block_tokens, size.total_blocks)
    return WorkerRegistration(worker_id, role, name, (os.getpid(),), *sizes)


def no_detokenizer(prompt: TokenIds) -> IncrementalDetokenizer:
    """Raise: the synthetic language has no text, and nobody asks for stop strings."""
    raise NotImplementedError("the synthetic language has no text")


@dataclass(slots=True)
class EmulatedService:
    """The router and its workers."""

    router: Router
    targets: list[EmulatedTarget] = field(default_factory=list)
    drafters: list[EmulatedDrafter] = field(default_factory=list)

    async def totals(self) -> RoundTotals:
        """Return the router's sums."""
        return (await self.router.status()).totals

    @property
    def busy_ms(self) -> float:
        """How long the targets have been busy, together."""
        return sum(target.usage.busy_ms for target in self.targets)

    @property
    def propose_steps(self) -> int:
        """How often drafters were asked to propose."""
        return sum(drafter.usage.steps for drafter in self.drafters)

    @property
    def devices(self) -> list[EmulatedUsage]:
        """What the emulated devices have done; a drafter's proposals and its drafting ahead are two entries."""
        drafting = [usage for drafter in self.drafters for usage in (drafter.usage, drafter.ahead_usage)]
        return [*(target.usage for target in self.targets), *drafting]

    @property
    def steps(self) -> int:
        """How many steps the emulated devices took."""
        return sum(usage.steps for usage in self.devices)

    @property
    def overruns(self) -> int:
        """How many steps took longer than the emulated device would have."""
        return sum(usage.overruns for usage in self.devices)

    @property
    def late_ms(self) -> float:
        """How much too late steps ended, together: no fault of the router, but in its rounds."""
        return sum(usage.late_ms for usage in self.devices)


@contextlib.asynccontextmanager
async def serving(layout: ServiceLayout, config: RouterConfig) -> AsyncIterator[EmulatedService]:
    """Run the service until the block ends. Afterwards no worker may hold anything: WrongTextError if one does."""
    service, links = EmulatedService(Router(config, no_detokenizer)), list[ThreadLink]()

    async def register(worker: EmulatedTarget | EmulatedDrafter, role: WorkerRole, name: str) -> None:
        links.append(ThreadLink(worker, layout.hop_ms))
        await service.router.register(registration(role, f"{role}-{len(links)}", name, layout.size), links[-1])

    try:
        for _ in range(layout.targets):
            target = EmulatedTarget(SyntheticTarget(LANGUAGE, layout.size), layout.target_timing)
            service.targets.append(target)
            await register(target, WorkerRole.TARGET, "synthetic")
        for index, each in enumerate(layout.drafters):
            guesser = SyntheticDrafter(LANGUAGE, layout.size, each.profile, f"{each.name} {index}")
            service.drafters.append(EmulatedDrafter(guesser, each.timing))
            await register(service.drafters[-1], WorkerRole.DRAFT, each.name)
        yield service
        await _all_released(service, layout.size.total_blocks)
    finally:
        await service.router.close()
        for link in links:
            await asyncio.to_thread(link.close)


async def _all_released(service: EmulatedService, total_blocks: int, patience_s: float = 5.0) -> None:
    workers: list[EmulatedTarget | EmulatedDrafter] = [*service.targets, *service.drafters]
    for _ in range(int(patience_s / 0.01)):
        if all(worker.stats().free_blocks == total_blocks for worker in workers):
            return
        await asyncio.sleep(0.01)
    raise WrongTextError("KV blocks are still held after all requests ended")


# --- requests -----------------------------------------------------------------------------------------------


def traffic(
    index: int, max_tokens: int, traffic_class: int = 0, speculation: SpeculationOptions = DRAFTED
) -> GenerationRequest:
    """Return the request with this number; equal numbers have equal texts."""
    prompt = [traffic_class, *(64 + mix(index * PROMPT_TOKENS + place) % 32_000 for place in range(1, PROMPT_TOKENS))]
    return GenerationRequest(
        f"request-{index}",
        token_ids(prompt),
        SamplingParams(seed=index),
        StopConditions(max_tokens),
        speculation,
        traffic_class=f"class {traffic_class}",
    )


@dataclass(slots=True)
class Answer:
    """What came of one request; `usage` is None if it was stopped."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    usage: SpeculationUsage | None = None


async def ask(router: Router, answer: Answer) -> None:
    """Generate to the end. Raises WrongTextError if the request fails."""
    async with contextlib.aclosing(router.generate(answer.request)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, GenerationFailed):
                raise WrongTextError(f"{answer.request.request_id} failed: {event.message}")
            answer.ids += event.token_ids.tolist()
            if event.finish_reason is not None:
                answer.usage = event.usage


def check(answers: Sequence[Answer]) -> None:
    """Compare all ids with plain decoding's, those of requests that were stopped as far as they came.

    Raises WrongTextError if any differ.
    """
    for answer in answers:
        request = answer.request
        expected = synthetic_text(LANGUAGE, request.prompt.tolist(), request.sampling, len(answer.ids))
        if answer.ids != expected or (answer.usage is not None and len(expected) != request.stop.max_tokens):
            raise WrongTextError(f"the ids of {request.request_id} are not those of plain decoding")


async def ask_all(router: Router, requests: Sequence[GenerationRequest], concurrency: int) -> list[Answer]:
    """Answer all requests, `concurrency` of them at a time, and check them."""
    answers, limit = [Answer(request) for request in requests], asyncio.Semaphore(concurrency)

    async def one(answer: Answer) -> None:
        async with limit:
            await ask(router, answer)

    await asyncio.gather(*map(one, answers))
    check(answers)
    return answers


class Clients:
    """Keeps `concurrency` requests in service, one after the other, until the block ends; then checks all ids."""

    def __init__(self, router: Router, concurrency: int, make_request: Callable[[int], GenerationRequest]) -> None:
        self.answers: list[Answer] = []
        self._router = router
        self._concurrency = concurrency
        self._make_request = make_request
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def tokens(self) -> int:
        """How many tokens have come."""
        return sum(len(answer.ids) for answer in self.answers)

    async def wait(self, seconds: float) -> None:
        """Let time pass. Raises WrongTextError as soon as a request fails."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def __aenter__(self) -> "Clients":
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._concurrency)]
        return self

    async def __aexit__(self, *failure: object) -> None:
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and failure == (None, None, None):
                raise outcome
        check(self.answers)

    async def _client(self) -> None:
        while True:
            answer = Answer(self._make_request(len(self.answers)))
            self.answers.append(answer)
            await ask(self._router, answer)
