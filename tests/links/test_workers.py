"""Draft and target workers as both links see them: one message at a time, a link opened while a step runs."""

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import HANG_S
from tests.links.helpers import KEYS, Handler, linked
from workers import draft_worker, target_worker
from workers.draft_worker import DraftWorker
from workers.engine import engine, verifier
from workers.errors import LinkError
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    DraftAheadRequest,
    ProposeRequest,
    ProposeResponse,
    ReleaseRequest,
    StatsRequest,
    VerifyRequest,
    VerifyResponse,
    WorkerStats,
)
from workers.target_worker import TargetWorker

LIMITS = SimpleNamespace(vocabulary_size=8, context_length=64, block_tokens=16, total_blocks=4)


class SlowModel:
    """A drafter and a verifier whose steps take a moment, and which counts how many run at once."""

    limits = LIMITS

    def __init__(self) -> None:
        self.started = threading.Event()
        self.running = self.most_running = self.steps = 0

    def _step(self) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.started.set()
        time.sleep(0.02)
        self.steps += 1
        self.running -= 1

    def propose(self, request: ProposeRequest) -> ProposeResponse:
        """Draft nothing, slowly."""
        self._step()
        return ProposeResponse((), 1.0)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Verify nothing, slowly."""
        self._step()
        return VerifyResponse((), 1.0, 0)

    def release(self, sequence_ids: object) -> None:
        """There is nothing to release."""

    def stats(self) -> WorkerStats:
        """All is free."""
        return WorkerStats(0, 4, 4)


@pytest.fixture
def local_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers listen here, and stop at the end, which in service is that of their process."""
    servers: list[ZmqServer] = []

    def start(host: str, answer: Handler) -> ZmqServer:
        servers.append(ZmqServer(host, answer))
        return servers[-1]

    for module in (draft_worker, target_worker):
        monkeypatch.setattr(module, "ZmqServer", start)
        monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    yield
    for server in servers:
        server.close()


@pytest.fixture(params=["draft", "target"])
def worker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, local_servers: None
) -> tuple[Any, SlowModel, Any]:
    """A loaded worker outside Ray, its model, and a step to ask for."""
    model, spec = SlowModel(), SimpleNamespace(tensor_parallel_size=1, emulated=None)
    monkeypatch.setattr(draft_worker, "build_drafter", lambda spec: model)
    monkeypatch.setattr(engine.Engine, "load", lambda config, rank: LIMITS)
    monkeypatch.setattr(verifier, "Verifier", lambda engine: model)
    made: Any
    if request.param == "draft":
        made = DraftWorker("draft-0", "tiny", spec)  # type: ignore[arg-type]
        made.load()
        return made, model, ProposeRequest(())
    made = TargetWorker("target-0", "tiny", spec, 0)  # type: ignore[arg-type]
    made.load(("127.0.0.1", 1), HANG_S)
    return made, model, VerifyRequest(())


def test_messages_of_both_links_are_handled_one_at_a_time(worker: tuple[Any, SlowModel, Any]) -> None:
    actor, model, step = worker

    async def run() -> None:
        async with linked(actor.open_link(KEYS.public)) as link:
            over_zmq = [link.call(step, HANG_S) for _ in range(5)]
            over_ray = [asyncio.to_thread(actor.handle, step) for _ in range(5)]
            answers = await asyncio.gather(*over_zmq, *over_ray)
        assert all(answer.compute_ms == 1.0 for answer in answers)

    asyncio.run(run())
    assert (model.steps, model.most_running) == (10, 1)


def test_a_link_is_opened_while_a_step_runs_and_its_messages_wait_for_the_end(
    worker: tuple[Any, SlowModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, model, step = worker
    finish = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: finish.wait(HANG_S))

    async def run() -> None:
        running = asyncio.create_task(asyncio.to_thread(actor.handle, step))
        assert await asyncio.to_thread(model.started.wait, HANG_S)
        async with linked(actor.open_link(KEYS.public)) as link:
            stats = asyncio.create_task(link.call(StatsRequest(), HANG_S))
            release = asyncio.create_task(link.call(ReleaseRequest(None), HANG_S))
            await asyncio.sleep(0.05)
            assert model.steps == 0
            assert not stats.done()
            finish.set()
            assert await stats == WorkerStats(0, 4, 4)
            assert await release is None
            await running

    asyncio.run(run())


def test_what_a_worker_does_not_answer_is_an_error_over_zeromq_too(worker: tuple[Any, SlowModel, Any]) -> None:
    actor, _, _ = worker

    async def run() -> None:
        async with linked(actor.open_link(KEYS.public)) as link:
            with pytest.raises(LinkError, match="SlowModel does not answer DraftAheadRequest"):
                await link.call(DraftAheadRequest(()), HANG_S)

    asyncio.run(run())
