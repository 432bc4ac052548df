"""The Serve supervisors of drafters and targets: one replica, one worker (or one tensor-parallel group)."""

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.config import DrafterSection, TargetSection, WorkerSection
from deployments.drafter_update import updated_section
from deployments.preflight import resolved_model
from deployments.supervision import StartedWorker, Supervisor, unwrap, with_process_ids
from workers.draft_worker import DraftWorkerActor
from workers.engine.pair import check_pair
from workers.messages import WorkerRegistration
from workers.target_worker import TargetWorkerActor
from workers.telemetry.config import BY_ENVIRONMENT, TelemetryConfig


def _actor_options(section: WorkerSection, bundle: int) -> dict[str, Any]:
    """Place a worker process in the replica's own placement group, one bundle per process."""
    return {
        "num_cpus": section.num_cpus,
        "num_gpus": section.num_gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            ray.util.get_current_placement_group(), placement_group_bundle_index=bundle
        ),
    }


async def _loaded(references: list[Any], timeout_s: float) -> list[WorkerRegistration]:
    """Await all ranks' registrations; the first failure ends the wait."""
    try:
        return list(await asyncio.wait_for(asyncio.gather(*references), timeout_s))
    except RayTaskError as error:
        raise unwrap(error) from error


class DraftPool:
    """One replica supervises one draft worker. `target_model` is what drafters must fit."""

    def __init__(
        self,
        section: DrafterSection,
        router: DeploymentHandle,
        load_timeout_s: float,
        drain_timeout_s: float,
        telemetry: TelemetryConfig,
        target_model: str,
    ) -> None:
        self._section = self._running = section
        self._telemetry = telemetry
        self._load_timeout_s = load_timeout_s
        self._target_model = target_model
        self._supervisor = Supervisor(self._start_worker, router, drain_timeout_s)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve before the replica counts as started, and whenever the deployment's `user_config` changes.

        The worker is replaced by one with the section as it is now, of which a request notices nothing but fewer
        drafts for a while. ConfigurationError, before anything is replaced, if the drafter does not fit the target.
        """
        section = resolved_model(updated_section(self._section, user_config))
        if section == self._running and self._supervisor.has_begun:
            return
        if section.model != self._section.model:
            await asyncio.to_thread(check_pair, self._target_model, section.model)
        self._running = section
        await self._supervisor.replace(self._start_worker)

    async def _start_worker(self) -> StartedWorker:
        section = self._running
        worker_id = f"draft-{section.name}-{uuid.uuid4().hex[:8]}"
        actor = DraftWorkerActor.options(**_actor_options(section, bundle=0)).remote(
            worker_id, section.name, section.spec(), self._telemetry
        )
        (registration,) = await _loaded([actor.load.remote()], self._load_timeout_s)
        return StartedWorker(registration, actor, (actor,))

    def check_health(self) -> None:
        """Called by Serve; raises while the worker is down."""
        self._supervisor.check()

    def __del__(self) -> Coroutine[Any, Any, None] | None:  # Serve calls it to stop the replica, and awaits it
        return self._supervisor.retirement()


class TargetPool:
    """One replica supervises one tensor-parallel group of target workers."""

    # Serve awaits it, so that a replica counts as started when its worker is registered.
    async def __init__(  # type: ignore[misc]
        self,
        section: TargetSection,
        router: DeploymentHandle,
        load_timeout_s: float,
        drain_timeout_s: float,
        telemetry: TelemetryConfig = BY_ENVIRONMENT,
    ) -> None:
        self._section = section
        self._telemetry = telemetry
        self._load_timeout_s = load_timeout_s
        self._supervisor = Supervisor(self._start_worker, router, drain_timeout_s)
        await self._supervisor.begin()

    async def _start_worker(self) -> StartedWorker:
        section = self._section
        worker_id = f"target-{uuid.uuid4().hex[:8]}"
        actors = tuple(
            TargetWorkerActor.options(**_actor_options(section, bundle=rank)).remote(
                worker_id,
                section.served_name,
                section.engine_config(section.tensor_parallel_size),
                rank,
                self._telemetry,
            )
            for rank in range(section.tensor_parallel_size)
        )
        meeting_point = await asyncio.wait_for(actors[0].reserve_address.remote(), self._load_timeout_s)
        loads = [actor.load.remote(meeting_point, self._load_timeout_s) for actor in actors]
        first, *others = await _loaded(loads, self._load_timeout_s)
        following = tuple(asyncio.wrap_future(actor.follow.remote().future()) for actor in actors[1:])
        return StartedWorker(with_process_ids(first, others), actors[0], actors, following)

    def check_health(self) -> None:
        """Called by Serve; raises while the group is down."""
        self._supervisor.check()

    def __del__(self) -> Coroutine[Any, Any, None] | None:  # Serve calls it to stop the replica, and awaits it
        return self._supervisor.retirement()
