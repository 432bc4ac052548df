"""Keeping one worker alive: start it, register it again and again, start it anew when it dies, let it go gracefully."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.restart_pacing import RestartPacing
from workers.errors import ConfigurationError, LinkError
from workers.messages import WorkerRegistration
from workers.router.peer import CONTROL_DEADLINE_S

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
PING_TIMEOUT_S = 10.0
REGISTER_TIMEOUT_S = CONTROL_DEADLINE_S + 5.0
MAX_REFUSED_BEATS = 2
MAX_FAILED_STARTS = 3
REGISTER_AGAIN_S = 2.0
DRAIN_POLL_S = 0.2
CANCEL_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A loaded worker: `entry` answers the router, `actors` are all its processes.

    `running` are calls that return only when a process of the group ends.
    """

    registration: WorkerRegistration
    entry: Any
    actors: tuple[Any, ...]
    running: "tuple[asyncio.Future[None], ...]" = ()

    def kill(self) -> None:
        """End every process of the worker."""
        for actor in self.actors:
            ray.kill(actor)


def unwrap(error: RayTaskError) -> Exception:
    """Return what the remote code raised, so that a configuration error reads like one."""
    cause = error.cause
    return cause if isinstance(cause, ConfigurationError) else error


class Supervisor:
    """Owns one worker at a time. The worker is dead when a ping says so or when one of its `running` calls ends.

    When it retires, the sequences that the router cannot move elsewhere have `drain_timeout_s` to finish.
    """

    def __init__(
        self, start: Callable[[], Awaitable[StartedWorker]], router: DeploymentHandle, drain_timeout_s: float = 0.0
    ) -> None:
        self._start = start
        self._router = router
        self._drain_timeout_s = drain_timeout_s
        self._worker: StartedWorker | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed_starts = 0
        self._refused_beats = 0
        self._pacing = RestartPacing(time.monotonic)

    async def begin(self) -> None:
        """Start the first worker and register it. Raises what its loading raises."""
        self._worker = await self._start()
        self._pacing.started()
        try:
            await self._register(self._worker)
        except Exception:
            self.end()
            raise
        self._task = asyncio.create_task(self._supervise())

    async def replace(self, start: Callable[[], Awaitable[StartedWorker]]) -> None:
        """Let the worker go gracefully, and begin one by `start` in its place. Raises what its loading raises."""
        retirement = self.retirement()
        if retirement is not None:
            await retirement
        self._start = start
        self._failed_starts = 0
        await self.begin()

    @property
    def has_begun(self) -> bool:
        """Whether there is a worker to look after, or will be again soon."""
        return self._task is not None

    def check(self) -> None:
        """Raise when the worker is down and starting another has failed again and again.

        While one is being loaded the replica counts as healthy: Serve would only start the same loading over.
        """
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(f"starting the worker failed {self._failed_starts} times in a row")

    def retirement(self) -> Coroutine[Any, Any, None] | None:
        """Return what lets the worker go gracefully; None if there is nothing to let go."""
        return None if self._task is None else self._retire(self._task)

    async def _retire(self, supervising: asyncio.Task[None]) -> None:
        """Take the worker out of service without a request noticing, then end its processes."""
        self._task = None
        # In Python 3.11 `wait_for` forgets a cancellation that comes together with what it waits for.
        while not supervising.done():
            supervising.cancel()
            await asyncio.wait({supervising}, timeout=CANCEL_AGAIN_S)
        worker = self._worker
        if worker is not None:
            await self._drain(worker.registration.worker_id)
            await self._unregister(worker)
        self.end()

    async def _drain(self, worker_id: str) -> None:
        """Return when the router has nothing left on the worker, or time is up, or the router cannot be reached."""
        deadline_s = asyncio.get_running_loop().time() + self._drain_timeout_s
        try:
            while await asyncio.wait_for(self._router.drain.remote(worker_id), PING_TIMEOUT_S):
                if asyncio.get_running_loop().time() >= deadline_s:
                    logger.warning("worker %s still has sequences after %g s", worker_id, self._drain_timeout_s)
                    return
                await asyncio.sleep(DRAIN_POLL_S)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("draining %s failed: %s", worker_id, error)

    def end(self) -> None:
        """Stop supervising and end the worker's processes."""
        if self._task is not None:
            self._task.cancel()
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    async def _supervise(self) -> None:
        while True:
            try:
                if self._worker is None:
                    self._worker = await self._start()
                    self._pacing.started()
                    self._failed_starts = 0
                    logger.info("worker %s replaces a dead one", self._worker.registration.worker_id)
                await self._watch(self._worker)
            except asyncio.CancelledError:
                raise
            except Exception:
                self._failed_starts += self._worker is None
                logger.exception("the worker could not be %s", "started" if self._worker is None else "registered")
            if self._worker is not None:
                await asyncio.sleep(REGISTER_AGAIN_S)
            elif pause_s := self._pacing.pause_s():
                logger.warning("the next worker is started in %g s", pause_s)
                await asyncio.sleep(pause_s)

    async def _watch(self, worker: StartedWorker) -> None:
        """Return when the worker is dead, having ended what is left of it. A new router learns of it within a beat."""
        self._refused_beats = 0
        while await self._alive(worker):
            await self._register(worker)
            await asyncio.sleep(HEARTBEAT_S)
        logger.warning("worker %s died", worker.registration.worker_id)
        self._worker = None
        worker.kill()
        await self._unregister(worker)

    async def _alive(self, worker: StartedWorker) -> bool:
        ended = [call for call in worker.running if call.done()]
        if self._refused_beats >= MAX_REFUSED_BEATS:
            logger.warning("worker %s answers pings but not the router", worker.registration.worker_id)
            return False
        if ended:
            logger.warning("a rank of %s ended: %s", worker.registration.worker_id, ended[0].exception())
            return False
        try:
            pings = [actor.ping.remote() for actor in worker.actors]
            await asyncio.wait_for(asyncio.gather(*pings), PING_TIMEOUT_S)
        except (RayActorError, TimeoutError):
            return False
        return True

    async def _register(self, worker: StartedWorker) -> None:
        try:
            await asyncio.wait_for(self._router.register.remote(worker.registration, worker.entry), REGISTER_TIMEOUT_S)
            self._refused_beats = 0
        except (RayError, RayServeException, TimeoutError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, ConfigurationError):
                raise cause from error
            # The router dropped this worker and cannot reset it: its step hangs, whatever its pings say.
            self._refused_beats += isinstance(cause, LinkError)
            # The router may be restarting, or the worker too busy to be reset: the next beat tries again.
            logger.warning("registering %s failed: %s", worker.registration.worker_id, error)

    async def _unregister(self, worker: StartedWorker) -> None:
        try:
            await asyncio.wait_for(self._router.unregister.remote(worker.registration.worker_id), PING_TIMEOUT_S)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("unregistering %s failed: %s", worker.registration.worker_id, error)


def with_process_ids(registration: WorkerRegistration, others: list[WorkerRegistration]) -> WorkerRegistration:
    """Return rank 0's registration naming the processes of all ranks."""
    process_ids = tuple(pid for entry in [registration, *others] for pid in entry.process_ids)
    return replace(registration, process_ids=process_ids)
