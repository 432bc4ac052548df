"""What rounds cost beside the devices with workers in Ray actors, over both links."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from benchmarks.harness import Row
from benchmarks.router_scale import overhead_rows
from benchmarks.router_service import LANGUAGE, ServiceLayout, no_detokenizer, registration
from deployments.local_cluster import local_ray
from workers.answering import answer
from workers.emulated.drafter import SyntheticDrafter
from workers.emulated.stretched import EmulatedDrafter, EmulatedTarget
from workers.emulated.target import SyntheticTarget
from workers.links import LinkKind
from workers.links.opening import WorkerLinks
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    DraftAheadResponse,
    LinkAddress,
    ProposeResponse,
    StatsRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

KINDS: tuple[LinkKind, ...] = ("zmq", "ray")


async def overhead_with_ray(quick: bool) -> list[Row]:
    """The overhead of a round over ZeroMQ and over Ray calls, in a Ray of its own."""
    rows: list[Row] = []
    with local_ray(2):
        for kind in KINDS:
            rows += await overhead_rows(f"Ray actors, link {kind}", partial(serving_with_ray, kind), quick)
    return rows


class SyntheticWorker:
    """A synthetic worker in a process of its own, answering like the worker actors."""

    def __init__(self, layout: ServiceLayout, role: WorkerRole) -> None:
        self._server: ZmqServer | None = None
        self._worker: EmulatedTarget | EmulatedDrafter
        if role is WorkerRole.TARGET:
            self._worker = EmulatedTarget(SyntheticTarget(LANGUAGE, layout.size), layout.target_timing)
        else:
            drafter = layout.drafters[0]
            self._worker = EmulatedDrafter(SyntheticDrafter(LANGUAGE, layout.size, drafter.profile), drafter.timing)

    def handle(self, message: WorkerRequest) -> WorkerResponse | None:
        """Answer one message of the link protocol. That the device wakes up late counts as its own time."""
        began_s = time.perf_counter()
        response = answer(self._worker, message)
        if isinstance(response, VerifyResponse | ProposeResponse | DraftAheadResponse):
            return replace(response, compute_ms=(time.perf_counter() - began_s) * 1e3)
        return response

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def open_link(self, router_public_key: bytes) -> LinkAddress:
        """As real workers do."""
        if self._server is None:
            self._server = ZmqServer("127.0.0.1", self.handle)
        return self._server.admit(router_public_key)


@contextlib.asynccontextmanager
async def serving_with_ray(kind: LinkKind, layout: ServiceLayout, config: RouterConfig) -> AsyncIterator[Router]:
    """Run the router with one target and one drafter as Ray actors."""
    options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0}
    actor: Any = ray.remote(**options, concurrency_groups={"control": 1})(SyntheticWorker)
    router, links, actors = Router(config, no_detokenizer), WorkerLinks(kind), []
    try:
        for role in (WorkerRole.TARGET, WorkerRole.DRAFT):
            actors.append(actor.remote(layout, role))
            # A link that opens has its deadline; a process that starts takes longer.
            await actors[-1].handle.remote(StatsRequest())
            link = await links.link_to(f"{role}-0", actors[-1])
            await router.register(registration(role, f"{role}-0", "synthetic"), link)
        yield router
    finally:
        await router.close()
        links.close_all()
        for each in actors:
            ray.kill(each)
        await asyncio.sleep(0)
