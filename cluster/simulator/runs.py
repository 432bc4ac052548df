"""A trace against a policy: what clients saw, what it cost, and how often pools changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cluster.autoscaling.application import ApplicationSettings, ApplicationState, decide
from cluster.autoscaling.snapshot import ServiceSnapshot
from cluster.simulator.devices import Devices
from cluster.simulator.service import DRAFTERS, SimulatedService
from cluster.simulator.traffic import Trace

DECIDE_EVERY_S = 5
PATIENCE_S = 600
ROLES = ("target", "drafter", "ingress")


class Scaler(Protocol):
    """Says how many replicas there should be of each role in `ROLES`, every few seconds."""

    def wanted(self, snapshot: ServiceSnapshot) -> Mapping[str, int]: ...


@dataclass(slots=True)
class Scaling:
    """The policies of `cluster.autoscaling`; `settings` has one drafter pool, called `DRAFTERS`."""

    settings: ApplicationSettings
    state: ApplicationState = field(default_factory=ApplicationState)

    def wanted(self, snapshot: ServiceSnapshot) -> Mapping[str, int]:
        """See `Scaler.wanted`."""
        self.state, decisions = decide(self.settings, self.state, snapshot)
        return dict(zip(ROLES, (decisions.targets, decisions.drafters[DRAFTERS], decisions.ingress), strict=True))


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a client expects: the time to the first token, and between tokens on average."""

    ttft_ms: float = 3_000.0
    itl_ms: float = 50.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The service at a time: requests in service, replicas of each role (those paid for), and what clients see."""

    at_s: float
    running: int
    waiting: int
    replicas: tuple[int, ...]
    ttft_ms: float | None
    itl_ms: float | None
    gpu_hours: float


@dataclass(slots=True)
class Outcome:
    """What came of a run. A request that missed an objective, or was not served in time, is a miss."""

    requests: int = 0
    misses: int = 0
    gpu_hours: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES[:2], 0.0))
    changes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    samples: list[Sample] = field(default_factory=list)


def simulate(
    trace: Trace, scaler: Scaler, devices: Devices, objectives: Objectives, warm_ups: Mapping[str, float]
) -> Outcome:
    """Run the trace to its end, and on until everybody is served (within ten minutes)."""
    service, outcome = SimulatedService(devices), Outcome(requests=len(trace.requests))
    pools = dict(zip(ROLES, (service.targets, service.drafters, service.ingress), strict=True))
    gpus = dict(zip(ROLES, (devices.gpus_per_target, devices.gpus_per_drafter, 0), strict=True))
    place = second = 0
    while second < trace.duration_s or (
        service.running + len(service.waiting) and second < trace.duration_s + PATIENCE_S
    ):
        first = place
        while place < len(trace.requests) and trace.requests[place].arrival_s < second + 1:
            place += 1
        service.second(second, list(trace.requests[first:place]), trace.acceptance(second))
        if second % DECIDE_EVERY_S == 0:
            counts = {role: pool.counts(second, warm_ups.get(role, 0.0)) for role, pool in pools.items()}
            load = service.load(second)
            snapshot = ServiceSnapshot(second, load, counts["target"], {DRAFTERS: counts["drafter"]}, counts["ingress"])
            for role, wanted in scaler.wanted(snapshot).items():
                outcome.changes[role] += pools[role].resize(wanted, second) != 0
            replicas = tuple(len(pool.replicas) for pool in pools.values())
            spent = sum(outcome.gpu_hours.values())
            outcome.samples.append(
                Sample(second, service.running, len(service.waiting), replicas, load.ttft_ms, load.itl_ms, spent)
            )
        for role in outcome.gpu_hours:
            outcome.gpu_hours[role] += len(pools[role].replicas) * gpus[role] / 3_600
        second += 1
    met = sum(each.ttft_ms <= objectives.ttft_ms and each.itl_ms <= objectives.itl_ms for each in service.served)
    outcome.misses = outcome.requests - met
    return outcome
