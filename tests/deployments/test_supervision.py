"""When a supervisor calls its replica unhealthy, without Ray: workers without processes, and a router that agrees."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deployments import supervision
from deployments.supervision import MAX_FAILED_STARTS, StartedWorker, Supervisor
from workers.messages import WorkerRegistration, WorkerRole

REGISTRATION = WorkerRegistration("draft-0", WorkerRole.DRAFT, "tiny", (1,), 257, 64, 16, 8)


class AgreeingMethod:
    """A method of a handle whose calls all succeed."""

    async def remote(self, *_: object) -> None:
        """Agree."""


class AgreeingRouter:
    """What a supervisor calls of the router's handle."""

    register = unregister = AgreeingMethod()


async def supervised(later_starts: Callable[[], Awaitable[StartedWorker]]) -> Supervisor:
    """A supervisor whose first worker is dead as soon as it is looked at."""
    died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    died.set_result(None)
    starts = 0

    async def start() -> StartedWorker:
        nonlocal starts
        starts += 1
        return StartedWorker(REGISTRATION, None, (), (died,)) if starts == 1 else await later_starts()

    router: Any = AgreeingRouter()
    supervisor = Supervisor(start, router)
    await supervisor.begin()
    return supervisor


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "RESTART_PAUSE_S", 0.0)


@pytest.mark.parametrize("failures", range(MAX_FAILED_STARTS))
def test_a_replica_is_healthy_while_its_worker_loads_even_after_failed_starts(failures: int) -> None:
    async def run() -> None:
        loading, attempts = asyncio.Event(), 0

        async def start() -> StartedWorker:
            nonlocal attempts
            attempts += 1
            if attempts <= failures:
                raise RuntimeError("no memory left")
            loading.set()
            await asyncio.Event().wait()
            raise AssertionError("never reached")

        supervisor = await supervised(start)
        await loading.wait()
        supervisor.check()
        supervisor.end()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_replica_is_unhealthy_after_three_failed_starts_in_a_row() -> None:
    async def run() -> None:
        failed = asyncio.Event()
        attempts = 0

        async def start() -> StartedWorker:
            nonlocal attempts
            attempts += 1
            if attempts > MAX_FAILED_STARTS:
                failed.set()
                await asyncio.Event().wait()
            raise RuntimeError("no memory left")

        supervisor = await supervised(start)
        await failed.wait()
        with pytest.raises(RuntimeError, match="failed 3 times"):
            supervisor.check()
        supervisor.end()

    asyncio.run(asyncio.wait_for(run(), 10))
