"""How many targets: by queue wait, latency objectives and KV pressure.

Latencies say that there are too few targets, but not how many would do: a step takes its time even for one sequence. So
the number of sequences that one target serves within the objectives is learned from what was observed, and the pool is
sized by it; a violated objective asks for more at once.
"""

import math
from dataclasses import dataclass, field

from cluster.autoscaling.damping import Damping, damped
from cluster.autoscaling.settings import TargetSettings
from cluster.autoscaling.snapshot import ServiceSnapshot

GROWTH = 2.0
"""A missed objective asks for so many times as many targets at most; a step down leaves at least the half of them."""
COMFORT = 0.7
"""Where every measure keeps this far below its objective, a target is known to serve what it has."""
BAND = 0.2
"""By so much fewer targets must be able to serve the load easily before they have to."""
CAUTION = 0.9
"""A target that was too slow with n sequences is taken to serve this share of n."""
FORGETTING_S = 3_600.0
"""What was learned in a bad hour is not true for ever: in about this time capacity goes back to what was expected."""


@dataclass(frozen=True, slots=True)
class TargetState:
    """What was learned of a target's capacity in sequences (0: nothing yet), and when that was last looked at."""

    capacity: float = 0.0
    at_s: float = 0.0
    damping: Damping = field(default_factory=Damping)


def scale_targets(settings: TargetSettings, state: TargetState, snapshot: ServiceSnapshot) -> tuple[TargetState, int]:
    """Return the new state and how many targets to ask for."""
    capacity = _learned(settings, state, snapshot)
    wish = _wish(settings, capacity, snapshot)
    damping, decision = damped(state.damping, settings.limits, snapshot.now_s, snapshot.targets.wanted, wish)
    return TargetState(capacity, snapshot.now_s, damping), decision


def pressure(settings: TargetSettings, snapshot: ServiceSnapshot) -> float:
    """Return by how much the worst measure misses its objective; 1 is just met, 0 is nothing to do."""
    load = snapshot.load
    measured = [
        (load.queue_wait_ms, settings.queue_wait_ms),
        (load.ttft_ms, settings.ttft_ms),
        (load.itl_ms, settings.itl_ms),
        (_mean_kv_use(snapshot), settings.kv_use),
    ]
    return max((value / objective for value, objective in measured if value is not None), default=0.0)


def _learned(settings: TargetSettings, state: TargetState, snapshot: ServiceSnapshot) -> float:
    """Return how many sequences one target serves, corrected by this snapshot if its targets are settled."""
    expected = settings.sequences_per_target
    known = state.capacity or expected
    passed_s = max(0.0, snapshot.now_s - state.at_s) if state.capacity else 0.0
    known += (expected - known) * (1 - math.exp(-passed_s / FORGETTING_S))
    load, targets = snapshot.load, snapshot.targets
    if not targets.settled or targets.usable == 0 or load.running == 0:
        return known
    served = load.running / targets.usable
    pressed = pressure(settings, snapshot)
    if pressed <= 1.0:
        return max(known, served) if pressed <= COMFORT else known
    too_slow = load.itl_ms is not None and load.itl_ms > settings.itl_ms
    return max(1.0, min(known, served * CAUTION if too_slow else served))


def _wish(settings: TargetSettings, capacity: float, snapshot: ServiceSnapshot) -> int:
    load, targets = snapshot.load, snapshot.targets
    usable = targets.usable
    needed = math.ceil(load.streams / capacity)
    if usable == 0:
        # Nothing runs that could be measured; but requests can be counted.
        return max(targets.wanted, needed)
    pressed = pressure(settings, snapshot)
    # While replicas start, what is measured is the pressure that they will relieve; and each serves one at least.
    if pressed > 1.0 and targets.settled and usable < load.streams:
        needed = max(needed, usable + 1, math.ceil(usable * min(GROWTH, pressed)))
    if needed > usable:
        return max(targets.wanted, needed)
    return targets.wanted if pressed > 1.0 or load.waiting else _fewest(settings, capacity, snapshot)


def _fewest(settings: TargetSettings, capacity: float, snapshot: ServiceSnapshot) -> int:
    """Return the fewest targets that serve the load with some room left, in sequences and in KV."""
    wanted, room = snapshot.targets.wanted, 1 - BAND
    for fewer in range(max(1, math.ceil(snapshot.targets.usable / GROWTH)), wanted):
        fits = snapshot.load.streams <= fewer * capacity * room
        if fits and sum(snapshot.load.kv_use) <= fewer * settings.kv_use * room:
            return fewer
    return wanted


def _mean_kv_use(snapshot: ServiceSnapshot) -> float:
    uses = snapshot.load.kv_use
    return sum(uses) / len(uses) if uses else 0.0
