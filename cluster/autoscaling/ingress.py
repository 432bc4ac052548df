"""How many ingress processes: by the streams that are open."""

import math

from cluster.autoscaling.damping import Damping, damped
from cluster.autoscaling.settings import IngressSettings
from cluster.autoscaling.snapshot import ServiceSnapshot

BAND = 0.2


def scale_ingress(settings: IngressSettings, state: Damping, snapshot: ServiceSnapshot) -> tuple[Damping, int]:
    """Return the new state and how many ingress processes to ask for. The count of streams is the router's own."""
    streams, counts = snapshot.load.streams, snapshot.ingress
    needed = max(1, math.ceil(streams / settings.streams_per_replica))
    if needed < counts.wanted:
        # With some room left, so that one stream more does not undo it.
        needed = min(counts.wanted, max(1, math.ceil(streams / (settings.streams_per_replica * (1 - BAND)))))
        if not counts.settled:
            needed = counts.wanted
    return damped(state, settings.limits, snapshot.now_s, counts.wanted, needed)
