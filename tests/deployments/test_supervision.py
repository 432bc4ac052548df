"""When a supervisor calls its replica unhealthy, without Ray: workers without processes, and a router that agrees."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from deployments import supervision
from deployments.supervision import MAX_FAILED_STARTS, StartedWorker, Supervisor
from workers.errors import ConfigurationError
from workers.messages import WorkerRegistration, WorkerRole

REGISTRATION = WorkerRegistration("draft-0", WorkerRole.DRAFT, "tiny", (1,), 257, 64, 16, 8)


class AgreeingMethod:
    """A method of a handle whose calls all succeed."""

    async def remote(self, *_: object) -> None:
        """Agree."""


class AgreeingRouter:
    """What a supervisor calls of the router's handle."""

    register = unregister = drain = AgreeingMethod()


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


class RecordingRouter:
    """A router whose worker has `left` sequences, one fewer at each call to drain; it notes every call."""

    def __init__(self, left: int = 0, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.left = left
        self.failure = failure
        self.register, self.unregister, self.drain = (
            NotedMethod(self, name) for name in ("register", "unregister", "drain")
        )


class NotedMethod:
    """A method of the recording router's handle."""

    def __init__(self, router: RecordingRouter, name: str) -> None:
        self.router = router
        self.name = name

    async def remote(self, *_: object) -> int:
        """Note the call; of `drain` return how many sequences are left."""
        self.router.calls.append(self.name)
        if self.name == "drain":
            if self.router.failure is not None:
                raise self.router.failure
            self.router.left -= 1
        return max(self.router.left, 0)


@dataclass(frozen=True, slots=True)
class NotedWorker(StartedWorker):
    """A worker that notes in `ended` when its processes are ended."""

    ended: list[str] = field(default_factory=list)

    def kill(self) -> None:
        """Note it."""
        self.ended.append("killed")


@pytest.mark.parametrize(
    ("left", "failure", "timeout_s", "calls"),
    [
        (1, None, 60.0, ["drain", "unregister", "killed"]),
        (3, None, 60.0, ["drain", "drain", "drain", "unregister", "killed"]),
        (1000, None, 0.0, ["drain", "unregister", "killed"]),
        (1000, RayServeException("no router"), 60.0, ["drain", "unregister", "killed"]),
    ],
)
def test_a_worker_that_retires_is_drained_then_unregistered_then_ended(
    left: int, failure: Exception | None, timeout_s: float, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "DRAIN_POLL_S", 0.0)

    async def run() -> None:
        router: Any = RecordingRouter(left, failure)

        async def start() -> StartedWorker:
            return NotedWorker(REGISTRATION, None, (), ended=router.calls)

        supervisor = Supervisor(start, router, timeout_s)
        await supervisor.begin()
        await asyncio.sleep(0)
        retiring = supervisor.retirement()
        assert retiring is not None
        await retiring
        assert supervisor.retirement() is None  # once is enough, whoever asks
        await asyncio.sleep(0.01)
        assert router.calls[router.calls.index("drain") :] == calls  # and no beat follows

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_worker_that_the_router_refuses_is_ended() -> None:
    async def run() -> None:
        ended: list[str] = []

        async def start() -> StartedWorker:
            return NotedWorker(REGISTRATION, None, (), ended=ended)

        async def refuse(*_: object) -> None:
            raise ConfigurationError("another vocabulary")

        router: Any = RecordingRouter()
        supervisor = Supervisor(start, router)
        supervisor._register = refuse  # type: ignore[method-assign]
        with pytest.raises(ConfigurationError):
            await supervisor.begin()
        assert ended == ["killed"] and supervisor.retirement() is None

    asyncio.run(asyncio.wait_for(run(), 10))
