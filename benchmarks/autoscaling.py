"""Autoscaling policies in a simulator: three traces, against Ray Serve's default policy on ongoing requests.

`make bench BENCH=autoscaling` takes under a minute, `QUICK=1` half of that. Requests, step times and start-up times are
made up (see `cluster.simulator`), so figures compare policies and promise nothing of a cluster. Both kinds of policy
have the same bounds and know how many sequences a target is expected to serve. `benchmarks/results/autoscaling-*.svg`
show the runs.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

from ray.serve.config import AutoscalingConfig

from benchmarks.autoscaling_default import ServeDefault
from benchmarks.autoscaling_plot import plot
from benchmarks.harness import ROOT, Row, report
from cluster.autoscaling import ApplicationSettings, DrafterSettings, IngressSettings, ScalingLimits, TargetSettings
from cluster.simulator import Devices, Objectives, Outcome, Scaler, Scaling, Trace, bursts, diurnal, drift, simulate
from cluster.simulator.service import DRAFTERS

DEVICES, OBJECTIVES = Devices(), Objectives()
SEQUENCES_PER_TARGET, STREAMS_PER_INGRESS = 32.0, 64.0
TARGETS = ScalingLimits(1, 6, upscale_delay_s=10, downscale_delay_s=300, warm_up_s=30)
POOLS = {
    "target": TARGETS,
    "drafter": ScalingLimits(0, 12, upscale_delay_s=10, downscale_delay_s=180, warm_up_s=20),
    "ingress": ScalingLimits(1, 6, upscale_delay_s=10, downscale_delay_s=120, warm_up_s=10),
}
ONGOING = {"target": SEQUENCES_PER_TARGET, "drafter": SEQUENCES_PER_TARGET, "ingress": STREAMS_PER_INGRESS}
OUR_WARM_UPS = {role: limits.warm_up_s for role, limits in POOLS.items()}


def ours() -> Scaler:
    """The policies of `cluster.autoscaling`."""
    targets = TargetSettings(
        POOLS["target"],
        ttft_ms=OBJECTIVES.ttft_ms,
        itl_ms=OBJECTIVES.itl_ms,
        sequences_per_target=SEQUENCES_PER_TARGET,
    )
    drafters = {DRAFTERS: DrafterSettings(POOLS["drafter"])}
    return Scaling(ApplicationSettings(targets, drafters, IngressSettings(POOLS["ingress"], STREAMS_PER_INGRESS)))


def serve_default(as_delivered: bool) -> Scaler:
    """Serve's default policy with the delays that our policies have, or with those that it comes with."""
    configs = {}
    for role, limits in POOLS.items():
        delays = {} if as_delivered else _delays(limits)
        configs[role] = AutoscalingConfig(
            min_replicas=limits.min_replicas,
            max_replicas=limits.max_replicas,
            target_ongoing_requests=ONGOING[role],
            **delays,
        )
    return ServeDefault(configs)


def _delays(limits: ScalingLimits) -> dict[str, float]:
    return {"upscale_delay_s": limits.upscale_delay_s, "downscale_delay_s": limits.downscale_delay_s}


POLICIES: Mapping[str, Callable[[], Scaler]] = {
    "Leadout": ours,
    "Serve default, our delays": lambda: serve_default(as_delivered=False),
    "Serve default, its delays": lambda: serve_default(as_delivered=True),
}


def shortened(trace: Trace, share: float) -> Trace:
    """Return the first part of a trace."""
    end_s = int(trace.duration_s * share)
    return replace(trace, duration_s=end_s, requests=tuple(each for each in trace.requests if each.arrival_s < end_s))


def rows_of(trace: Trace, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Return misses, cost and changes of each policy."""
    rows = []
    for name, outcome in outcomes.items():
        case = f"{trace.name}: {name}"
        share = 100 * outcome.misses / max(1, outcome.requests)
        rows.append(Row(f"{case}: objectives missed, of {outcome.requests:,} requests", share, "%"))
        rows += [Row(f"{case}: {role}s", hours, "GPU-hours") for role, hours in outcome.gpu_hours.items()]
        rows.append(Row(f"{case}: scale events of targets", outcome.changes["target"], "events"))
        rows.append(Row(f"{case}: scale events of drafters and ingress", _others(outcome), "events"))
    return rows


def _others(outcome: Outcome) -> int:
    return sum(outcome.changes.values()) - outcome.changes["target"]


def main() -> None:
    """Run the traces against all policies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows: list[Row] = []
    for trace in (diurnal(), bursts(), drift()):
        chosen = shortened(trace, 0.4) if quick else trace
        outcomes = {
            # A replica that Serve sees run counts at once.
            name: simulate(chosen, make(), DEVICES, OBJECTIVES, OUR_WARM_UPS if make is ours else {})
            for name, make in POLICIES.items()
        }
        rows += rows_of(chosen, outcomes)
        path = ROOT / "benchmarks" / "results" / f"autoscaling-{trace.name.replace(' ', '-')}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(plot(trace.name, outcomes))
    report("autoscaling", rows)


if __name__ == "__main__":
    main()
