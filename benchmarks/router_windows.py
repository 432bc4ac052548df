"""Windows of steady load on the router over emulated devices, and what was seen in them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Row
from benchmarks.router_service import Clients, EmulatedService, ServiceLayout, serving, traffic
from workers.messages import GenerationRequest, SpeculationOptions
from workers.router.config import RouterConfig

REQUEST_TOKENS = 256
PLAIN = SpeculationOptions(enabled=False)


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in one window of `seconds`.

    `busy_share` is of one target's time; `loop_share` and `cpu_share` are processor time of the router's event loop and
    of the whole process, per second. `overrun_share` is of the emulated devices' steps, and `late_ms` how late each of
    them woke up on average: both tell how busy this machine was, not how good the router is.
    """

    seconds: float
    tokens: int
    rounds: int
    accepted_length: float
    draft_length: float
    busy_share: float
    loop_share: float
    cpu_share: float
    overrun_share: float
    late_ms: float

    def health(self, case: str) -> list[Row]:
        """Return what must be small for the window to say anything."""
        return [
            Row(f"{case}: overruns", self.overrun_share, "of the steps"),
            Row(f"{case}: devices waking up late", self.late_ms, "ms/step"),
        ]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all streams."""
        return self.tokens / self.seconds

    @property
    def rounds_per_s(self) -> float:
        """Rounds per second over all targets."""
        return self.rounds / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams, which requests they send, and how long to wait and to measure, in seconds."""

    concurrency: int
    make_request: Callable[[int], GenerationRequest]
    warm_s: float
    measure_s: float


def one_class(index: int) -> GenerationRequest:
    """Return traffic of the first class."""
    return traffic(index, REQUEST_TOKENS)


def without_drafts(index: int) -> GenerationRequest:
    """Return the same traffic, decoded plainly."""
    return traffic(index, REQUEST_TOKENS, speculation=PLAIN)


def half_and_half(index: int) -> GenerationRequest:
    """Return traffic of the first and second class in turn."""
    return traffic(index, REQUEST_TOKENS, traffic_class=index % 2)


async def measure(layout: ServiceLayout, config: RouterConfig, load: Load) -> Window:
    """Serve `load` and look at a window of it. Raises WrongTextError if any id is not plain decoding's."""
    async with serving(layout, config) as service, Clients(service.router, load.concurrency, load.make_request) as all_:
        await all_.wait(load.warm_s)
        return await _window(service, all_, load.measure_s)


async def _window(service: EmulatedService, clients: Clients, seconds: float) -> Window:
    before, tokens = await service.totals(), clients.tokens
    busy_ms, steps, overruns = service.busy_ms, service.steps, service.overruns
    late_ms = service.late_ms
    began, loop_began, cpu_began = time.perf_counter(), time.thread_time(), time.process_time()
    await clients.wait(seconds)
    elapsed = time.perf_counter() - began
    loop_s, cpu_s = time.thread_time() - loop_began, time.process_time() - cpu_began
    after = await service.totals()
    taken = max(1, service.steps - steps)
    verifications = max(1, after.verifications - before.verifications)
    return Window(
        seconds=elapsed,
        tokens=clients.tokens - tokens,
        rounds=after.rounds - before.rounds,
        accepted_length=(after.committed_tokens - before.committed_tokens) / verifications,
        draft_length=(after.draft_tokens - before.draft_tokens) / verifications,
        busy_share=(service.busy_ms - busy_ms) / 1e3 / elapsed / len(service.targets),
        loop_share=loop_s / elapsed,
        cpu_share=cpu_s / elapsed,
        overrun_share=(service.overruns - overruns) / taken,
        late_ms=(service.late_ms - late_ms) / taken,
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated windows, and how far the others are from it, as a share of it."""

    value: float
    spread: float


def spread_of(values: list[float]) -> Spread:
    """Return median and half the range."""
    middle = median(values)
    return Spread(middle, (max(values) - min(values)) / 2 / middle if middle else 0.0)
