"""The policy that Serve's controller calls for each deployment of an application with autoscaling."""

from typing import Any

import msgspec
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.autoscaling import ApplicationSettings
from deployments.autoscaler import ROUTER, PoolOfRouter, shared_autoscaler
from workers.messages import RouterLoad

IMPORT_PATH = "deployments.autoscaling_policy:PoolPolicy"
LOOK_BACK_INTERVALS = 5
"""Serve keeps measurements of so many intervals. It records one each fifth of that, so a new one is sent each time."""


class PoolPolicy:
    """Made by Serve, once per deployment, from `policy_kwargs`; see `serve_autoscaling`."""

    def __init__(self, of: dict[str, Any], settings: dict[str, Any], interval_s: float) -> None:
        self._of = msgspec.convert(of, PoolOfRouter)
        self._settings = msgspec.convert(settings, ApplicationSettings)
        self._interval_s = interval_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the replicas to have; delays and hysteresis are those of `cluster.autoscaling`, not Serve's."""
        pool, index = self._of.pool, self._of.index
        autoscaler = shared_autoscaler(str(context.app_name), self._settings, self._interval_s, self._of.sharding)
        wanted, now_s = context.target_num_replicas, float(context.current_time or 0.0)
        if pool == ROUTER:
            latest = latest_metrics(context.raw_metrics or {})
            if latest is not None:
                autoscaler.see_load(RouterLoad.from_metrics(latest[1]), latest[0], now_s, index)
            return wanted, {}
        autoscaler.see_pool(pool, wanted, context.running_replicas, now_s, index)
        return autoscaler.decision(pool, wanted, index), {}


def latest_metrics(series: dict[str, dict[Any, list[Any]]]) -> tuple[float, dict[str, float]] | None:
    """Return the newest measurement and its time. A name that is missing from it has no value now, whatever it had."""
    points = [(name, replica[-1]) for name, each in series.items() for replica in each.values() if replica]
    if not points:
        return None
    newest_s = max(point.timestamp for _, point in points)
    return newest_s, {name: point.value for name, point in points if point.timestamp == newest_s}


def serve_autoscaling(
    of: PoolOfRouter, bounds: tuple[int, int, int], settings: ApplicationSettings, interval_s: float
) -> AutoscalingConfig:
    """Return Serve's configuration of one pool, or of a router, of which there is one that tells what it measures.

    `bounds` are the least, the first and the largest number of its replicas.
    """
    policy = AutoscalingPolicy(
        policy_function=IMPORT_PATH,
        policy_kwargs={
            "of": msgspec.to_builtins(of),
            "settings": msgspec.to_builtins(settings),
            "interval_s": interval_s,
        },
    )
    return AutoscalingConfig(
        min_replicas=bounds[0],
        initial_replicas=bounds[1],
        max_replicas=bounds[2],
        metrics_interval_s=interval_s,
        look_back_period_s=LOOK_BACK_INTERVALS * interval_s,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=policy,
    )
