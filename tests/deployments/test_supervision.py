"""When a supervisor calls its replica unhealthy, without Ray: workers without processes, and a router that agrees."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from deployments import restart_pacing, supervision
from deployments.restart_pacing import LONGEST_PAUSE_S, SETTLED_AFTER_S, RestartPacing
from deployments.supervision import MAX_FAILED_STARTS, StartedWorker, Supervisor
from tests.limits import HANG_S
from workers.errors import ConfigurationError, DeadlineExceededError, LinkError, UnfitWorkerError
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
    monkeypatch.setattr(restart_pacing, "FIRST_PAUSE_S", 0.0)


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

    asyncio.run(asyncio.wait_for(run(), HANG_S))


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

    asyncio.run(asyncio.wait_for(run(), HANG_S))


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

    asyncio.run(asyncio.wait_for(run(), HANG_S))


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

    asyncio.run(asyncio.wait_for(run(), HANG_S))


# --- half-dead workers ---------------------------------------------------------------------------------------


class Rank:
    """A process of a worker. A stopped one answers no ping, as if by SIGSTOP."""

    def __init__(self, stopped: bool = False) -> None:
        self.stopped = stopped
        self.ping = self

    async def remote(self) -> None:
        """Answer the ping."""
        if self.stopped:
            await asyncio.Event().wait()


class RefusingRouter(RecordingRouter):
    """A router that dropped the first worker, and cannot reset it."""

    def __init__(self, refusal: LinkError) -> None:
        super().__init__()
        self.register: Any = self
        self._refusal = refusal

    async def remote(self, registration: WorkerRegistration, _: object) -> None:
        """Refuse the first worker, unless it is new."""
        self.calls.append(f"register {registration.worker_id}")
        if registration.worker_id == "draft-0" and self.calls.count("register draft-0") > 1:
            raise RayTaskError("register", "traceback", self._refusal)


async def until_replaced(router: RecordingRouter, ranks: tuple[Rank, ...]) -> list[str]:
    """Supervise a worker with these ranks until another one has replaced it; return what became of the first."""
    ended: list[str] = []
    replaced = asyncio.Event()

    async def start() -> StartedWorker:
        if ended:
            replaced.set()
            return NotedWorker(replace(REGISTRATION, worker_id="draft-1"), None, (), ended=[])
        return NotedWorker(REGISTRATION, None, ranks, ended=ended)

    supervisor = Supervisor(start, router)  # type: ignore[arg-type]
    await supervisor.begin()
    await replaced.wait()
    calls = list(router.calls)
    retiring = supervisor.retirement()
    assert retiring is not None
    await retiring
    router.calls = calls
    return ended


@pytest.mark.parametrize("stopped", [(True, False), (False, True)])
def test_b47_a_worker_one_rank_of_which_is_stopped_is_ended_whole_and_replaced(
    stopped: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "PING_TIMEOUT_S", 0.02)
    router = RecordingRouter()
    ended = asyncio.run(asyncio.wait_for(until_replaced(router, tuple(map(Rank, stopped))), HANG_S))
    assert ended == ["killed"]
    assert router.calls == ["register", "unregister"]


@pytest.mark.parametrize("refusal", [DeadlineExceededError("its step hangs"), UnfitWorkerError("no finite logits")])
def test_b47_a_worker_that_answers_pings_but_is_of_no_use_to_the_router_is_replaced(
    refusal: LinkError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "HEARTBEAT_S", 0.0)
    router = RefusingRouter(refusal)
    ended = asyncio.run(asyncio.wait_for(until_replaced(router, (Rank(), Rank())), HANG_S))
    assert ended == ["killed"]
    # One refusal may be an accident, two are none.
    assert router.calls == ["register draft-0"] * 3 + ["unregister"]


def test_a_worker_that_keeps_dying_young_is_started_ever_later_and_one_that_lived_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart_pacing, "FIRST_PAUSE_S", 1.0)
    clock = 0.0
    pacing = RestartPacing(lambda: clock)

    def pause_after_living(lived_s: float) -> float:
        nonlocal clock
        pacing.started()
        clock += lived_s
        return pacing.pause_s()

    restart_pauses = [pause_after_living(lived_s) for lived_s in (SETTLED_AFTER_S, 0.0, 1.0, 1.0)]
    assert restart_pauses == [0.0, 1.0, 2.0, 4.0]
    assert pacing.pause_s() == 8.0  # the next one did not start at all
    assert [pause_after_living(0.0) for _ in range(100)][-1] == LONGEST_PAUSE_S
    assert pause_after_living(SETTLED_AFTER_S) == 0.0
    assert pause_after_living(0.0) == 1.0


def test_a_supervisor_waits_before_it_starts_a_worker_that_died_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_pacing, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(restart_pacing, "LONGEST_PAUSE_S", 3600.0)

    async def run() -> None:
        async def start() -> StartedWorker:
            raise AssertionError("not yet")

        supervisor = await supervised(start)
        await asyncio.sleep(0.01)
        supervisor.check()  # healthy: Serve has nothing to do about it
        retiring = supervisor.retirement()
        assert retiring is not None
        await retiring  # nor does it keep the replica from being stopped

    asyncio.run(asyncio.wait_for(run(), HANG_S))
