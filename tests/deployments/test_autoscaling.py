"""Configured autoscaling, through the policies as Serve's controller makes and calls them. No cluster."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.app import wire
from deployments.autoscaler import _shared
from deployments.config import parse_config
from deployments.preflight import ServedModel
from tests.fakes import ScriptedDrafter, ScriptedTarget
from tests.router.helpers import Answer, ask, request, run, serving, turns, until
from workers.errors import ConfigurationError
from workers.messages import DrafterPoolLoad, RouterLoad

DELAYS = {"upscale_delay_s": 5.0, "downscale_delay_s": 20.0, "warm_up_s": 5.0}
SCALED = {
    "target": {"model": "m", "autoscaling": {"max_replicas": 4, "sequences_per_target": 8.0, **DELAYS}},
    "drafters": [{"name": "tiny", "model": "d", "autoscaling": {"max_replicas": 4, **DELAYS}}],
    "ingress": {"autoscaling": {"max_replicas": 3, "streams_per_replica": 10.0, **DELAYS}},
    "autoscaling": {"interval_s": 1.0},
}
POOLS = ("TargetPool", "DraftPool-tiny", "Ingress")
IDLE = RouterLoad(kv_use=(0.0,))
BUSY = RouterLoad(
    running=24,
    waiting=2,
    kv_use=(0.5,),
    queue_wait_ms=3_000.0,
    itl_ms=50.0,
    draft_tokens=4.0,
    verifications=900,
    drafters_busy=0.9,
    exposed_draft_wait=0.4,
    drafter_pools=(DrafterPoolLoad("tiny", 1, 0, 24),),
)

CALM = replace(BUSY, running=6, waiting=0, queue_wait_ms=1.0, exposed_draft_wait=0.1, drafters_busy=0.5)


@pytest.fixture(autouse=True)
def _no_autoscaler_is_left() -> Iterator[None]:
    yield
    _shared.clear()


def deployed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the application's deployments by name."""
    found: dict[str, Any] = {}

    def visit(application: Any) -> None:
        bound = application._bound_deployment
        found[bound.name] = bound
        for each in [*bound.init_args, *(entry for arg in bound.init_args if isinstance(arg, list) for entry in arg)]:
            if hasattr(each, "_bound_deployment"):
                visit(each)

    visit(wire(parse_config(arguments), ServedModel("{}", 1000, 512)))
    return found


class Controller:
    """What Serve's controller does with the policies: replicas are there `start_s` after they were asked for."""

    def __init__(self, arguments: dict[str, Any], start_s: float = 3.0, pools: Sequence[str] = POOLS) -> None:
        self.pools = pools
        self.now_s, self.start_s = 1_000.0, start_s
        self.replicas: dict[str, dict[str, float]] = {}
        self._policies: dict[str, Callable[[AutoscalingContext], tuple[int, dict[str, Any]]]] = {}
        self._configs: dict[str, AutoscalingConfig] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._serial = 0
        for name, deployment in deployed(arguments).items():
            config = deployment._deployment_config.autoscaling_config
            if config is not None:
                self._configs[name] = config
                policy = config.policy
                self._policies[name] = _apply_autoscaling_config(policy.get_policy()(**policy.policy_kwargs))
                self.replicas[name], self._states[name] = {}, {}
                self._resize(name, config.initial_replicas, at_s=self.now_s - start_s)

    def wanted(self) -> tuple[int, ...]:
        """Return how many replicas are asked for of each pool that scales."""
        return tuple(len(self.replicas[name]) for name in self.pools if name in self.replicas)

    def run(
        self,
        load: RouterLoad,
        seconds: int,
        measured_s: float | None = None,
        others: Mapping[str, RouterLoad | None] = MappingProxyType({}),
    ) -> list[tuple[int, ...]]:
        """Let time pass with this load; return what was asked for from second to second.

        `others` are the loads of routers that have another one, None of those that tell none.
        """
        history = []
        for _ in range(seconds):
            self.now_s += 1.0
            for name, policy in self._policies.items():
                told = others.get(name, load) if name.startswith("Router") else None
                metrics = {} if told is None else told.as_metrics()
                wanted, self._states[name] = policy(self._context(name, metrics, measured_s or self.now_s))
                config = self._configs[name]
                self._resize(name, max(config.min_replicas, min(config.max_replicas, wanted)), self.now_s)
            history.append(self.wanted())
        return history

    def _context(self, name: str, metrics: dict[str, float], measured_s: float) -> AutoscalingContext:
        deployment = DeploymentID(name, "leadout")
        running = [
            ReplicaID(replica, deployment)
            for replica, asked_s in self.replicas[name].items()
            if self.now_s - asked_s >= self.start_s
        ]
        return AutoscalingContext(
            deployment_id=deployment,
            deployment_name=name,
            app_name="leadout",
            current_num_replicas=len(running),
            target_num_replicas=len(self.replicas[name]),
            running_replicas=running,
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics=None,
            raw_metrics={key: {running[0]: [TimeStampedValue(measured_s, value)]} for key, value in metrics.items()},
            capacity_adjusted_min_replicas=self._configs[name].min_replicas,
            capacity_adjusted_max_replicas=self._configs[name].max_replicas,
            policy_state=self._states[name],
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now_s,
            config=self._configs[name],
        )

    def _resize(self, name: str, wanted: int, at_s: float) -> None:
        replicas = self.replicas[name]
        while len(replicas) < wanted:
            self._serial += 1
            replicas[f"replica-{self._serial}"] = at_s
        while len(replicas) > wanted:
            replicas.popitem()


def test_pools_follow_the_load_up_and_down_again_without_turning_back() -> None:
    controller = Controller(SCALED)
    assert controller.wanted() == (1, 1, 1)

    rise = controller.run(BUSY, 20)
    assert rise[3] == (1, 1, 1), "before the delay"
    assert rise[-1][0] >= 2 and rise[-1][1] >= 2 and rise[-1][2] == 3
    assert rise == sorted(rise)

    fall = controller.run(replace(IDLE, kv_use=(0.0,) * rise[-1][0]), 80)
    assert fall[-1] == (1, 0, 1)
    assert fall == sorted(fall, reverse=True)


def test_thirty_streams_of_which_half_are_dropped_leave_no_load_and_no_replica() -> None:
    async def test() -> tuple[Controller, RouterLoad, RouterLoad]:
        controller = Controller(SCALED)
        async with serving(ScriptedTarget(delay_s=0.02), ScriptedDrafter(), max_draft_tokens=2) as router:
            streams = [asyncio.create_task(ask(router, request(number=number))) for number in range(30)]
            await until(lambda: router.load().running == 30)
            open_streams = router.load()
            controller.run(open_streams, 20)
            for stream in streams[::2]:
                stream.cancel()
            answers = await asyncio.gather(*streams, return_exceptions=True)
            assert all(isinstance(answer, Answer) and answer.finish_reason for answer in answers[1::2])
            await turns()
            return controller, open_streams, router.load()

    controller, open_streams, left = run(test)

    assert open_streams.streams == 30 and controller.wanted()[2] == 3
    assert left.streams == 0 and left.kv_use == (0.0,)
    quiet = controller.run(left, 30)
    assert quiet[-1] == (1, 0, 1)
    assert set(controller.run(left, 60)) == {(1, 0, 1)}


def test_drafters_go_alone_when_nothing_is_accepted_any_more() -> None:
    controller = Controller(SCALED)
    assert controller.run(CALM, 30)[-1] == (1, 1, 1)
    benched = replace(CALM, draft_tokens=0.2, drafter_pools=(DrafterPoolLoad("tiny", 1, 1, 6),))
    assert controller.run(benched, 30)[-1] == (1, 0, 1)


def test_nothing_changes_while_the_router_does_not_tell_its_load() -> None:
    controller = Controller(SCALED)
    assert set(controller.run(BUSY, 60, measured_s=controller.now_s - 60.0)) == {(1, 1, 1)}


def test_a_router_that_is_down_for_a_moment_scales_nothing() -> None:
    controller = Controller(SCALED)
    controller.run(CALM, 20)
    controller.run(BUSY, 2)
    assert set(controller.run(BUSY, 60, measured_s=controller.now_s - 30.0)) == {(1, 1, 1)}
    assert controller.run(BUSY, 20)[-1] > (1, 1, 1)


def test_only_pools_with_the_section_scale_and_targets_that_do_not_still_bound_drafters() -> None:
    arguments = SCALED | {"target": {"model": "m", "replicas": 1}, "ingress": {}}
    controller = Controller(arguments)
    assert controller.run(replace(BUSY, drafters_busy=4.0), 200)[-1] == (2,)


def test_without_the_section_nothing_of_it_is_deployed() -> None:
    deployments = deployed({"target": {"model": "m", "replicas": 2}, "drafters": [{"name": "tiny", "model": "d"}]})
    assert all(each._deployment_config.autoscaling_config is None for each in deployments.values())
    assert deployments["TargetPool"].num_replicas == 2


SHARDED = SCALED | {
    "target": {"model": "m", "autoscaling": {"min_replicas": 2, "max_replicas": 5, **DELAYS}},
    "router": {"replicas": 2},
}
SHARDED_POOLS = ("TargetPool-0", "TargetPool-1", "DraftPool-tiny-0", "DraftPool-tiny-1", "Ingress")


def test_pools_follow_the_load_of_all_routers_together_and_keep_each_routers_share() -> None:
    controller = Controller(SHARDED, pools=SHARDED_POOLS)
    assert controller.wanted() == (1, 1, 1, 0, 1)

    # Neither router's streams alone would ask for a second ingress process.
    assert controller.run(replace(CALM, running=8), 20)[-1] == (1, 1, 1, 1, 2)

    rise = controller.run(BUSY, 40, others={"Router-1": replace(IDLE, running=20, itl_ms=400.0)})
    assert rise == sorted(rise)
    assert rise[-1][:2] == (3, 2) and rise[-1][4] == 3
    assert sum(rise[-1][2:4]) >= 2 and min(rise[-1][2:4]) >= 1

    fall = controller.run(IDLE, 80)
    assert fall[-1] == (1, 1, 0, 0, 1)


def test_nothing_changes_while_one_of_several_routers_tells_nothing() -> None:
    controller = Controller(SHARDED, pools=SHARDED_POOLS)
    assert set(controller.run(BUSY, 60, others={"Router-1": None})) == {(1, 1, 1, 0, 1)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": {"model": "m", "autoscaling": {"max_replicas": 0}}}, "target.autoscaling.max_replicas"),
        ({"target": {"model": "m", "autoscaling": {"min_replicas": 0, "max_replicas": 1}}}, "autoscaling.min_replicas"),
        (
            {"target": {"model": "m", "autoscaling": {"min_replicas": 3, "max_replicas": 2}}},
            "target.autoscaling: .*max_replicas 2 is below min_replicas 3",
        ),
        (
            {"target": {"model": "m", "replicas": 2, "autoscaling": {"max_replicas": 3}}},
            "target: .*replicas and autoscaling exclude",
        ),
        ({"target": {"model": "m", "autoscaling": {"max_replicas": 2, "kv_use": 1.5}}}, "target.autoscaling.kv_use"),
        ({"target": {"model": "m", "autoscaling": {"max_replicas": 2, "ttft": 5}}}, "target.autoscaling.ttft"),
        (
            {"drafters": [{"name": "a", "model": "d", "autoscaling": {"max_replicas": 2, "least_per_target": 3.0}}]},
            r"drafters\[0\].autoscaling: .*most_per_target 2.0 is below least_per_target 3.0",
        ),
        ({"ingress": {"autoscaling": {"max_replicas": 2, "kv_use": 0.5}}}, "ingress.autoscaling.kv_use"),
        ({"autoscaling": {"interval_s": 0}}, "autoscaling.interval_s"),
    ],
)
def test_impossible_values_are_refused_with_their_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_config({"target": {"model": "m"}} | change)
