"""Delays: a pool changes only after it has wanted to for a while, and then by the least that it wanted meanwhile."""

from dataclasses import dataclass

from cluster.autoscaling.settings import ScalingLimits


@dataclass(frozen=True, slots=True)
class Damping:
    """Since when a pool wants more (`direction` 1) or fewer (-1) replicas, and the smallest change among its wishes."""

    direction: int = 0
    since_s: float = 0.0
    mildest: int = 0


def damped(state: Damping, limits: ScalingLimits, now_s: float, wanted: int, wish: int) -> tuple[Damping, int]:
    """Return the new state and the replicas to ask for now, where `wanted` are asked for already.

    A wish in the other direction, or for no change, starts the delay anew.
    """
    wish = limits.clipped(wish)
    direction = (wish > wanted) - (wish < wanted)
    if direction == 0:
        return Damping(), wanted
    if direction != state.direction:
        state = Damping(direction, now_s, wish)
    mildest = min(state.mildest, wish) if direction > 0 else max(state.mildest, wish)
    delay_s = limits.upscale_delay_s if direction > 0 else limits.downscale_delay_s
    if now_s - state.since_s >= delay_s:
        return Damping(), mildest
    return Damping(direction, state.since_s, mildest), wanted
