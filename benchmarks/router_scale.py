"""What rounds cost beside the devices, and how many of them one router can run."""

import contextlib
from collections.abc import AsyncIterator
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
from workers.messages import RoundTotals
from workers.router.config import RouterConfig
from workers.router.router import Router

DRAFT_TOKENS = 4


async def scale(quick: bool) -> list[Row]:
    """More and more targets, with a drafter each: how far rounds per second grow, and the router's processor time."""
    warm_s, measure_s = (0.7, 1.5) if quick else (3.0, 10.0)
    config = router_config(**SYNCHRONOUS, max_draft_tokens=DRAFT_TOKENS)
    rows: list[Row] = []
    alone = 0.0
    for targets in (1, 2, 4, 8):
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
    """What a synchronous round takes beside the devices, with workers in threads."""
    return await overhead_rows("threads", serving_in_threads, quick)


async def overhead_rows(kind: str, serve: Any, quick: bool) -> list[Row]:
    config = router_config(**SYNCHRONOUS, max_draft_tokens=DRAFT_TOKENS)
    rows = []
    for streams in (1, 8):
        requests = [traffic(index, 64 if quick else 256) for index in range(streams)]
        async with serve(one_drafter(0.8), config) as router:
            # The first round of a process pays for much that later ones find done.
            await ask_all(router, [traffic(1_000, 8)], 1)
            before = (await router.status()).totals
            await ask_all(router, requests, streams)
            after = (await router.status()).totals
        rows.append(Row(f"overhead: {kind}, {streams} streams, k = {DRAFT_TOKENS}", _beside(before, after), "ms/round"))
    return rows


def _beside(before: RoundTotals, after: RoundTotals) -> float:
    """Milliseconds per round in which no device computed."""
    computed_ms = after.draft_compute_ms + after.verify_compute_ms - before.draft_compute_ms - before.verify_compute_ms
    return (after.wall_ms - before.wall_ms - computed_ms) / (after.rounds - before.rounds)


@contextlib.asynccontextmanager
async def serving_in_threads(layout: ServiceLayout, config: RouterConfig) -> AsyncIterator[Router]:
    """Run the router with workers in threads."""
    async with serving(layout, config) as service:
        yield service.router
