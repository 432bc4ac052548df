"""Ray Serve's own policy on ongoing requests, for the simulator: Ray's functions, with the simulator's clock."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    _get_cold_start_scale_up_replicas,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.autoscaling import ReplicaCounts, ServiceSnapshot
from cluster.simulator.service import DRAFTERS


@dataclass(slots=True)
class ServeDefault:
    """`configs` by role. All pools see the requests in service, averaged over the look-back period as Serve does."""

    configs: Mapping[str, AutoscalingConfig]
    _ongoing: deque[tuple[float, int]] = field(default_factory=deque)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def wanted(self, snapshot: ServiceSnapshot) -> Mapping[str, int]:
        """See `cluster.simulator.Scaler.wanted`."""
        self._ongoing.append((snapshot.now_s, snapshot.load.streams))
        pools = {"target": snapshot.targets, "drafter": snapshot.drafters[DRAFTERS], "ingress": snapshot.ingress}
        return {role: self._decide(role, counts, snapshot.now_s) for role, counts in pools.items()}

    def _decide(self, role: str, counts: ReplicaCounts, now_s: float) -> int:
        config = self.configs[role]
        while self._ongoing[0][0] < now_s - config.look_back_period_s:
            self._ongoing.popleft()
        ongoing = sum(count for _, count in self._ongoing) / len(self._ongoing)
        context = _context(config, counts, ongoing, now_s)
        if (cold := _get_cold_start_scale_up_replicas(context)) is not None:
            return int(cold)
        desired, _ = replica_queue_length_autoscaling_policy(context)
        desired = max(0, _apply_scaling_factors(desired, context.current_num_replicas, config))
        state = self._states.get(role, {})
        decided, self._states[role] = _apply_delay_logic(desired, counts.wanted, config, state, _now=now_s)
        return int(max(config.min_replicas, min(config.max_replicas, decided)))


def _context(config: AutoscalingConfig, counts: ReplicaCounts, ongoing: float, now_s: float) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=DeploymentID("simulated"),
        deployment_name="simulated",
        app_name="simulated",
        # Serve counts a replica as soon as it runs.
        current_num_replicas=counts.usable,
        target_num_replicas=counts.wanted,
        running_replicas=[],
        total_num_requests=ongoing,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=config,
    )
