"""Autoscaling of a real service over several Ray nodes on one machine: the tiny pair, emulated accelerators.

One node claims four A100s, two claim an L4 each. Load rises, acceptance collapses, load ends, and clients leave in the
middle of their streams; a timeline shows how many workers are registered, and all that was not left is complete.
`make bench BENCH=autoscaling_live`; `QUICK=1` watches for a shorter while at the end. Workers start as fast as this
machine's CPUs let them; device times are emulated.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.cluster import A100, DRAFT_NODES, L4
from benchmarks.cluster_nodes import HEAD_LABELS, serving_on_nodes, several_nodes
from benchmarks.harness import Row, report, tiny_pair_config
from models.corpus import held_out_prompts

POLL_S = 2.0
PATIENCE_S = 900.0
LIMITS = {"upscale_delay_s": 4.0, "downscale_delay_s": 20.0, "warm_up_s": 8.0}
CODE = {"temperature": 0.0}
NOISE = {"temperature": 2.0}
"""At this temperature the target draws what no drafter can guess."""


def service_arguments() -> dict[str, Any]:
    """The tiny pair with one to two targets and up to two drafters that cost as much as they can bring."""
    config = tiny_pair_config(
        target={
            "kv_cache_gib": 0.1,
            "num_gpus": 1.0,
            "node_labels": A100,
            "emulated": {"base_ms": 30.0, "token_ms": 0.5},
            "autoscaling": {"max_replicas": 2, "sequences_per_target": 8.0, "itl_ms": 200.0, **LIMITS},
        },
        drafters={
            "kv_cache_gib": 0.1,
            "num_gpus": 1.0,
            "node_labels": L4,
            "emulated": {"step_ms": 6.0, "row_ms": 0.1},
            "autoscaling": {"max_replicas": 2, "exposed_wait": 0.15, "retry_s": 600.0, **LIMITS},
        },
        router={"node_labels": HEAD_LABELS},
        ingress={"node_labels": HEAD_LABELS},
        autoscaling={"interval_s": 1.0, "window_s": 10.0},
    )
    return dict(config["applications"][0]["args"])


@dataclass(slots=True)
class Watch:
    """Reads `/status` again and again; `lines` is the timeline."""

    client: httpx.AsyncClient
    began_s: float = field(default_factory=time.monotonic)
    phase: str = "start"
    lines: list[tuple[float, str, int, int, int, int]] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                told = (await self.client.get("/status")).json()
                roles = [worker["registration"]["role"] for worker in told["workers"]]
                counts = (roles.count("target"), roles.count("draft"))
                self.lines.append((self.at_s, self.phase, told["running"], told["waiting"], *counts))
                if len(self.lines) < 2 or self.lines[-1][1:] != self.lines[-2][1:]:
                    print("{:6.0f} s  {:22} {:3} running {:3} waiting  {} targets {} drafters".format(*self.lines[-1]))
            await asyncio.sleep(POLL_S)

    @property
    def at_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self.began_s

    @property
    def workers(self) -> tuple[int, int]:
        """Targets and drafters that are registered."""
        return self.lines[-1][4:] if self.lines else (0, 0)

    async def until(self, reached: Callable[[int, int], bool], patience_s: float) -> float:
        """Wait for a number of targets and drafters; return the seconds it took. RuntimeError if it never comes."""
        began_s = time.monotonic()
        while not reached(*self.workers):
            if time.monotonic() - began_s > patience_s:
                raise RuntimeError(f"{self.phase}: still {self.workers} after {patience_s:g} s")
            await asyncio.sleep(POLL_S / 4)
        return time.monotonic() - began_s

    def changes(self, since: int = 0) -> int:
        """Return how often the number of workers changed after the line with this index."""
        counts = [line[4:] for line in self.lines[since:]]
        return sum(before != after for before, after in pairwise(counts))


class Clients:
    """Streams one after the other, `concurrency` at a time, until they are told to stop."""

    def __init__(self, client: httpx.AsyncClient, concurrency: int, tokens: int, sampling: dict[str, float]) -> None:
        self.complete = self.incomplete = 0
        self._client = client
        self._body = {"max_tokens": tokens, "ignore_eos": True, **sampling}
        self._tokens = tokens
        self._prompts = held_out_prompts(8)
        self._going_on = True
        self._tasks = [asyncio.create_task(self._one(number)) for number in range(concurrency)]

    async def _one(self, number: int) -> None:
        while self._going_on:
            number += len(self._tasks)
            prompt = self._prompts[number % len(self._prompts)]
            try:
                answer = await self._client.post(
                    "/v1/completions", json={"prompt": prompt, "seed": number, **self._body}
                )
                whole = answer.status_code == httpx.codes.OK
                whole = whole and answer.json()["choices"][0]["finish_reason"] in ("length", "stop")
            except httpx.HTTPError:
                whole = False
            self.complete += whole
            self.incomplete += not whole

    async def stop(self) -> None:
        """Let the streams that run come to their end."""
        self._going_on = False
        await asyncio.gather(*self._tasks)


async def dropped_streams(client: httpx.AsyncClient, count: int, tokens: int) -> int:
    """Open streams; every second one is left after its first event. Return how many others came to their end."""

    async def one(number: int) -> bool:
        body = {"prompt": "def f(", "max_tokens": tokens, "stream": True, "seed": number, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if number % 2 and line.startswith("data:"):
                    return False
                if line == "data: [DONE]":
                    return True
        return False

    return sum(await asyncio.gather(*map(one, range(count))))


async def run(url: str, quick: bool) -> list[Row]:
    """Go through the phases. RuntimeError if a pool does not follow."""
    hold_s = 0.0 if quick else 30.0
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        watch = Watch(client)
        watching = asyncio.create_task(watch.run())
        try:
            times = {}
            watch.phase = "load rises"
            clients = Clients(client, 20, 96, CODE)
            began_s = time.monotonic()
            await watch.until(lambda targets, _: targets == 2, PATIENCE_S)
            times["load rises: until two targets serve"] = time.monotonic() - began_s
            await watch.until(lambda _, drafters: drafters >= 1, PATIENCE_S)
            times["load rises: until a drafter serves, too"] = time.monotonic() - began_s
            await asyncio.sleep(hold_s)
            await clients.stop()
            watch.phase = "acceptance collapses"
            noise = Clients(client, 8, 96, NOISE)
            collapse = watch.until(lambda _, drafters: drafters == 0, PATIENCE_S)
            times["acceptance collapses: until no drafter is left"] = await collapse
            await noise.stop()
            watch.phase = "load ends"
            end = watch.until(lambda targets, drafters: (targets, drafters) == (1, 0), PATIENCE_S)
            times["load ends: until the minimum is left"] = await end
            watch.phase = "streams are dropped"
            whole = await dropped_streams(client, 30, 64)
            watch.phase = "nobody asks"
            await asyncio.sleep(LIMITS["downscale_delay_s"])
            await watch.until(lambda targets, drafters: (targets, drafters) == (1, 0), PATIENCE_S)
            quiet = len(watch.lines)
            await asyncio.sleep(10.0 if quick else 60.0)
            left = (await client.get("/status")).json()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    rows = [Row(case, value, "s") for case, value in times.items()]
    served = clients.complete + noise.complete
    return [
        *rows,
        Row("requests served meanwhile", served, "requests"),
        Row("requests that failed or were cut", clients.incomplete + noise.incomplete, "requests", 0),
        Row("30 streams, half of them left: others that are whole", whole, "streams", 15),
        Row("afterwards: sequences that the router counts", left["running"] + left["waiting"], "sequences", 0),
        Row("afterwards: changes of the number of workers", watch.changes(quiet), "changes", 0),
        Row("most targets", max(line[4] for line in watch.lines), "targets"),
        Row("most drafters", max(line[5] for line in watch.lines), "drafters"),
    ]


def main() -> None:
    """Start a service and go through the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with several_nodes() as nodes:
        nodes.add("a100", 2, 4, A100)
        for name in DRAFT_NODES:
            nodes.add(name, 1, 1, L4)
        with serving_on_nodes(service_arguments(), 0, PATIENCE_S) as url:
            rows = asyncio.run(run(url, quick))
    report("autoscaling_live", rows)


if __name__ == "__main__":
    main()
