"""What rounds cost beside the devices, and how many of them one router can run."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.harness import Row
from benchmarks.router_service import (
    DrafterLayout,
    ServiceLayout,
    ask_all,
    router_config,
    serving,
    traffic,
)
from benchmarks.router_speed import SYNCHRONOUS, UNIT, one_drafter
from benchmarks.router_windows import Load, measure, one_class
from workers.emulated.language import AcceptanceProfile
from workers.router.config import RouterConfig
from workers.router.router import Router
from workers.router.totals import RoundClock, TotalsCounter

DRAFT_TOKENS = 4


async def scale(quick: bool) -> list[Row]:
    """More and more targets, with a drafter each: how far rounds per second grow, and the router's processor time."""
    warm_s, measure_s = (0.7, 1.5) if quick else (3.0, 10.0)
    config = router_config(**SYNCHRONOUS, max_draft_tokens=DRAFT_TOKENS)
    rows: list[Row] = []
    alone = 0.0
    for targets in (1, 2, 4, 8) if quick else (1, 2, 4, 8, 16, 32):
        layout = ServiceLayout((DrafterLayout(AcceptanceProfile((0.8,))),) * targets, targets)
        window = await measure(layout, config, Load(8 * targets, one_class, warm_s, measure_s))
        alone = alone or window.rounds_per_s
        case, bound = f"scale: {targets} targets, {8 * targets} streams", alone * targets
        rows += [
            Row(f"{case}: rounds", window.rounds_per_s, "rounds/s, emulated", bound, window.rounds_per_s / bound),
            Row(f"{case}: tokens", window.tokens_per_s, UNIT),
            Row(f"{case}: event loop", window.loop_share, "of a core"),
            Row(f"{case}: whole process, workers included", window.cpu_share, "of a core"),
            *window.health(case),
        ]
    return rows


async def overhead(quick: bool) -> list[Row]:
    """What a round takes beside the devices, with workers in threads; that these wake up late is in it."""
    return await overhead_rows("threads", serving_in_threads, quick)


async def overhead_rows(kind: str, serve: Any, quick: bool) -> list[Row]:
    """The median round's time in which no device computed, and where it goes."""
    rows = []
    for streams, ahead in ((1, False), (1, True), (8, False)):
        config = router_config(**SYNCHRONOUS | {"draft_ahead": ahead}, max_draft_tokens=DRAFT_TOKENS)
        requests = [traffic(index, 64 if quick else 256) for index in range(streams)]
        async with serve(one_drafter(0.8), config) as router:
            # The first round of a process pays for much that later ones find done.
            await ask_all(router, [traffic(1_000, 8)], 1)
            with recorded_rounds() as rounds:
                await ask_all(router, requests, streams)
        case = f"overhead: {kind}, {streams} streams, k = {DRAFT_TOKENS}{', drafting ahead' if ahead else ''}"
        rows.append(Row(case, median(each.total_ms for each in rounds), "ms/round, median"))
        rows += [
            Row(f"{case}: {part}", median(getattr(each, f"{name}_ms") for each in rounds), "ms/round, median")
            for part, name in (("router", "router"), ("link to drafter", "drafter"), ("link to target", "target"))
        ]
        rows.append(Row(f"{case}: mean", mean(each.total_ms for each in rounds), "ms/round, mean"))
    return rows


@dataclass(frozen=True, slots=True)
class RoundOverhead:
    """Milliseconds of one round in which no device computed: in the router, and on the way to each worker and back."""

    router_ms: float
    drafter_ms: float
    target_ms: float

    @classmethod
    def of(cls, clock: RoundClock) -> "RoundOverhead":
        """Of a round that is over, with what it waited for drafting ahead to end."""
        return cls(
            clock.wall_ms() - clock.draft_wait_ms - clock.verify_wait_ms,
            clock.draft_wait_ms - clock.draft_compute_ms,
            clock.verify_wait_ms - clock.verify_compute_ms,
        )

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.router_ms + self.drafter_ms + self.target_ms


@contextlib.contextmanager
def recorded_rounds() -> Iterator[list[RoundOverhead]]:
    """Collect the overhead of every round that ends meanwhile."""
    rounds: list[RoundOverhead] = []
    count = TotalsCounter.add_round

    def record(counter: TotalsCounter, clock: RoundClock) -> None:
        rounds.append(RoundOverhead.of(clock))
        count(counter, clock)

    TotalsCounter.add_round = record  # type: ignore[method-assign,assignment]
    try:
        yield rounds
    finally:
        TotalsCounter.add_round = count  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def serving_in_threads(layout: ServiceLayout, config: RouterConfig) -> AsyncIterator[Router]:
    """Run the router with workers in threads."""
    async with serving(layout, config) as service:
        yield service.router
