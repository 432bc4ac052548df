"""What HTTP and Ray add to a token: times at the client against times inside the router, for the same events.

`make bench BENCH=http_overhead` sends 40 streams per concurrency (1, 8, 32), `QUICK=1` 12. All processes of a machine
share a monotonic clock: the router notes when a request reaches it and when each of its events leaves, the client when
it sent the request and when each event came. With `return_token_ids` every event of the router is one event of the
stream. "Added" is, for the first token, the client's time minus the router's; for events, the way from the router to
the client; its figures are medians over all requests or events, and 90th percentiles. The CPU time of the processes
on the way, for each event, says where the time goes and hardly depends on what else the machine does.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from ray import serve

from benchmarks.harness import Row, report, tiny_pair_config
from benchmarks.load import SEEDED, completion_body
from benchmarks.processes import cpu_ms
from benchmarks.raw_http import Answer, ask
from deployments import app
from deployments.config import LeadoutConfig, parse_config
from deployments.local_cluster import (
    APPLICATION_NAME,
    deploy,
    free_port,
    local_ray,
    logical_cpus,
    wait_for_drafters,
    wait_until_ready,
)
from deployments.preflight import check_deployment
from models.corpus import held_out_prompts
from workers.messages import GenerationEvent, GenerationRequest
from workers.router.actor import RouterActor

CONCURRENCIES = (1, 8, 32)
STREAMS, FEW_STREAMS = 40, 12
MAX_TOKENS = 48
AIM_FIRST_MS, AIM_EVENT_MS = 8.0, 2.0
START_TIMEOUT_S = 300.0
ON_THE_WAY = ("HTTP proxy", "ingress", "router")


class TimedRouter(RouterActor):
    """The router, noting when a request comes and when each of its events leaves, in seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._times: dict[str, list[float]] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `RouterActor.generate`."""
        times = self._times[request.request_id] = [time.monotonic()]
        events = super().generate(request)
        try:
            async for event in events:
                times.append(time.monotonic())
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def take_times(self) -> dict[str, list[float]]:
        """Return the times of all requests by their id, and forget them."""
        times, self._times = self._times, {}
        return times


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one stream: to the first token, and from event to event, at the client and in the router."""

    first: float
    router_first: float
    gaps: list[float]
    router_gaps: list[float]
    ways: list[float]


def timing_of(answer: Answer, times: Sequence[float]) -> Timing:
    """Hold a client's times against the router's. RuntimeError if their events are not the same."""
    arrived, (began, *left) = answer.chunk_s, times
    if len(arrived) != len(left):
        raise RuntimeError(f"{len(left)} events left the router and {len(arrived)} came")
    return Timing(
        first=1e3 * (arrived[0] - answer.sent_s),
        router_first=1e3 * (left[0] - began),
        gaps=[1e3 * (after - before) for before, after in pairwise(arrived)],
        router_gaps=[1e3 * (after - before) for before, after in pairwise(left)],
        ways=[1e3 * (came - went) for came, went in zip(arrived[1:], left[1:], strict=True)],
    )


async def timings_at(url: str, router: Any, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Timing]:
    """Send all streams, `concurrency` of them in flight together."""
    limit = asyncio.Semaphore(concurrency)
    await router.take_times.remote()

    async def one(body: dict[str, Any]) -> Answer:
        async with limit:
            return await ask(url, body)

    answers = await asyncio.gather(*map(one, bodies))
    times = await router.take_times.remote()
    return [timing_of(answer, times[f"{answer.chunks[0]['id']}-0"]) for answer in answers]


def rows_of(concurrency: int, timings: Sequence[Timing]) -> list[Row]:
    """Word one concurrency; the aims are for one stream at a time."""
    aimed = concurrency == 1
    added = [timing.first - timing.router_first for timing in timings]
    gaps = median(gap for timing in timings for gap in timing.gaps)
    router_gaps = median(gap for timing in timings for gap in timing.router_gaps)
    ways = [way for timing in timings for way in timing.ways]
    at = f"concurrency {concurrency}: "
    return [
        Row(f"{at}first token, client", median(timing.first for timing in timings), "ms"),
        Row(f"{at}first token, router", median(timing.router_first for timing in timings), "ms"),
        _against(f"{at}first token, added", median(added), AIM_FIRST_MS if aimed else None),
        Row(f"{at}first token, added, 90 %", quantiles(added, n=10)[-1], "ms"),
        Row(f"{at}between events, client", gaps, "ms"),
        Row(f"{at}between events, router", router_gaps, "ms"),
        _against(f"{at}event, router to client", median(ways), AIM_EVENT_MS if aimed else None),
        Row(f"{at}event, router to client, 90 %", quantiles(ways, n=10)[-1], "ms"),
    ]


async def rows_at(url: str, router: Any, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Row]:
    """Measure one concurrency."""
    before = cpu_ms(os.getpid())
    timings = await timings_at(url, router, bodies, concurrency)
    spent = cpu_ms(os.getpid())
    spent.subtract(before)
    events = sum(len(timing.ways) + 1 for timing in timings)
    at = f"concurrency {concurrency}: "
    cpu = [Row(f"{at}CPU of the {role} per event", spent[role] / events, "ms") for role in ON_THE_WAY]
    return [*rows_of(concurrency, timings), *cpu]


def _against(case: str, value: float, bound: float | None) -> Row:
    return Row(case, value, "ms", bound, None if bound is None else value / bound)


def measure(config: LeadoutConfig, streams: int) -> list[Row]:
    """Deploy with a router that notes times, in a Ray of its own, and measure."""
    prompts = held_out_prompts(streams)
    bodies = [completion_body(prompt, SEEDED, True, MAX_TOKENS) | {"stream": True} for prompt in prompts]
    url = f"http://127.0.0.1:{(port := free_port())}"
    with local_ray(logical_cpus(config)):
        with patch.object(app, "RouterActor", TimedRouter):
            deploy(app.wire(config, check_deployment(config)), "127.0.0.1", port)
        wait_until_ready(url, START_TIMEOUT_S)
        wait_for_drafters(url, len(config.drafters), START_TIMEOUT_S)
        router = serve.get_deployment_handle("Router", APPLICATION_NAME)

        async def run() -> list[Row]:
            await timings_at(url, router, bodies, max(CONCURRENCIES))
            return [row for concurrency in CONCURRENCIES for row in await rows_at(url, router, bodies, concurrency)]

        return asyncio.run(run())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    streams = FEW_STREAMS if parser.parse_args().quick else STREAMS
    config = parse_config(tiny_pair_config()["applications"][0]["args"])
    report("http_overhead", measure(config, streams))


if __name__ == "__main__":
    main()
