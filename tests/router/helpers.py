"""What the router's tests do over and over: serve scripted workers, collect a request's events, look for leaks."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenizers import Tokenizer

from tests.fakes import FIRST_TOY_OUTPUT, ScriptedWorker, byte_tokenizer, toy_continuation
from tests.fakes.virtual_time import run_virtually
from tests.limits import HANG_S
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.errors import LinkError
from workers.messages import (
    FinishReason,
    GenerationFailed,
    GenerationRequest,
    OnlineCheckTotals,
    SamplingParams,
    SpeculationOptions,
    SpeculationUsage,
    StopConditions,
    TokenChunk,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.draft_length import DraftCandidate, DraftLengthPolicy, DraftPlan, LaneView
from workers.router.router import Router

PATIENCE_S = 30.0
"""Far more than any test needs: a hang fails instead of stalling the suite."""
TOKENIZER: Tokenizer = byte_tokenizer().backend_tokenizer
T = TypeVar("T")


def run(test: Callable[[], Awaitable[T]]) -> T:
    """Run an asynchronous test body within `PATIENCE_S` of virtual time."""
    return run_virtually(lambda _: asyncio.wait_for(test(), PATIENCE_S))


def run_in_real_time(test: Callable[[], Awaitable[T]]) -> T:
    """Run a test body with threads that keep their own time within `HANG_S`."""

    async def bounded() -> T:
        return await asyncio.wait_for(test(), HANG_S)

    return asyncio.run(bounded())


class ChangingLengths:
    """A policy that takes the next of `lengths` for every sequence of every round."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = itertools.cycle(lengths)

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """See `DraftLengthPolicy.plan`."""
        return DraftPlan(
            {candidate.sequence_id: min(candidate.limit, next(self._lengths)) for candidate in candidates},
            groups=view.max_groups,
        )

    def forget(self, sequence_id: int) -> None:
        """See `DraftLengthPolicy.forget`."""


def make_router(policy: DraftLengthPolicy | None = None, **limits: Any) -> Router:
    """A router without workers; `limits` are those of RouterConfig."""
    return Router(
        RouterConfig(**limits),
        lambda prompt: IncrementalDetokenizer(TOKENIZER, prompt.tolist()),
        None if policy is None else lambda: policy,
    )


@contextlib.asynccontextmanager
async def serving(*workers: ScriptedWorker, **limits: Any) -> AsyncIterator[Router]:
    """A router with `workers` in service. Afterwards no worker may have seen a message it could not follow."""
    router = make_router(**limits)
    for worker in workers:
        await router.register(worker.registration, worker)
    try:
        yield router
    finally:
        await router.close()
        assert [violation for worker in workers for violation in worker.violations] == []


@contextlib.asynccontextmanager
async def supervised(router: Router, *workers: ScriptedWorker) -> AsyncIterator[None]:
    """Do as supervisors do: start workers anew when they die, register all of them again and again."""

    async def supervise() -> None:
        while True:
            for worker in workers:
                worker.revive()
                with contextlib.suppress(LinkError):
                    await router.register(worker.registration, worker)
            await asyncio.sleep(0.001)

    task = asyncio.create_task(supervise())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def request(
    length: int = 5,
    max_tokens: int = 20,
    number: int = 0,
    timeout_s: float = 60.0,
    stop_strings: tuple[str, ...] = (),
    end_token_ids: frozenset[int] = frozenset(),
    **speculation: Any,
) -> GenerationRequest:
    """A request whose prompt and seed depend on `number`."""
    prompt = [(number * 7 + position * 3) % FIRST_TOY_OUTPUT for position in range(length)]
    return GenerationRequest(
        f"request-{number}",
        token_ids(prompt),
        SamplingParams(seed=number, choice=number % 2),
        StopConditions(max_tokens, end_token_ids, stop_strings),
        SpeculationOptions(**speculation),
        timeout_s,
    )


def plainly(asked: GenerationRequest, tokens: int | None = None) -> list[int]:
    """What the toy target alone answers."""
    return toy_continuation(asked.prompt.tolist(), asked.sampling, tokens or asked.stop.max_tokens)


@dataclass
class Answer:
    """The events of one request."""

    chunks: list[TokenChunk] = field(default_factory=list)
    failure: GenerationFailed | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens, in order."""
        return [int(token) for chunk in self.chunks for token in chunk.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None when it failed or was cancelled."""
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def usage(self) -> SpeculationUsage:
        """The usage of the last chunk."""
        usage = self.chunks[-1].usage
        assert usage is not None
        return usage


async def ask(router: Router, asked: GenerationRequest, into: Answer | None = None) -> Answer:
    """Take the request's events to their end; `into` receives them as they come."""
    answer = Answer() if into is None else into
    events = router.generate(asked)
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, GenerationFailed):
                answer.failure = event
            else:
                assert answer.finish_reason is None, "an event after the last one"
                answer.chunks.append(event)
    return answer


async def ask_all(router: Router, asked: Sequence[GenerationRequest]) -> list[Answer]:
    """Take all requests at once."""
    return list(await asyncio.gather(*(ask(router, each) for each in asked)))


async def turns(count: int = 6) -> None:
    """Let the event loop turn, so that what was scheduled is sent."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, within the patience of `run`."""
    while not condition():
        await asyncio.sleep(0.001)


def in_service(router: Router) -> set[str]:
    """The ids of the registered workers."""
    return {peer.worker_id for peer in router._peers()}


async def assert_nothing_is_left(router: Router, *workers: ScriptedWorker) -> None:
    """No sequence in service, none held by a worker, and all blocks free in every ledger."""
    await turns()
    status = await router.status(with_worker_stats=True)
    assert (status.running, status.waiting) == (0, 0)
    assert [worker.held for worker in workers] == [{}] * len(workers)
    for report in status.workers:
        assert report.stats is not None
        assert report.stats.sequences == 0
        assert report.stats.free_blocks == report.stats.total_blocks
    for peer in router._peers():
        assert peer.ledger.reserved == {}
        assert peer.ledger.free_blocks == peer.ledger.total_blocks


async def checks_done(router: Router) -> OnlineCheckTotals:
    """The totals once no check waits or runs."""
    await until(lambda: router._checks.totals.pending == 0)
    return router._checks.totals


async def first_check_begins(router: Router) -> None:
    """Wait until a check is in service."""
    await until(lambda: any(running.is_check for running in router._running()))
