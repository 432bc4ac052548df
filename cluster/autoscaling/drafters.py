"""How many drafters of one name: by the draft wait that rounds see, and none where speculation does not pay."""

import math
from dataclasses import dataclass, field, replace

from cluster.autoscaling.damping import Damping, damped
from cluster.autoscaling.settings import DrafterSettings
from cluster.autoscaling.snapshot import ServiceSnapshot

BAND = 0.2
"""By so much the remaining drafters must meet what is asked of them before one goes."""
CONTENDED = 0.5
"""Drafters that compute less than this share of the time would not be quicker if there were more of them."""
SATURATED = 0.9
"""Drafters that compute more than this share of the time are too few, even if short drafts keep the wait short."""
QUIET = 0.2
"""Where drafters compute less than this share of the time together, what is waited for is no other drafter's work."""
EASED = 0.7
"""Drafts that did not pay may pay again when the load has fallen to this share."""
ENOUGH_VERIFICATIONS = 20
MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class DrafterState:
    """While drafters are left out: the load per target when they were, and when to try them again.

    `trials` counts how often they were given up without having paid in between.
    """

    paused_load: float | None = None
    retry_at_s: float = 0.0
    trials: int = 0
    damping: Damping = field(default_factory=Damping)


def scale_drafters(
    settings: DrafterSettings, state: DrafterState, snapshot: ServiceSnapshot, name: str, targets: int
) -> tuple[DrafterState, int]:
    """Return the new state and how many drafters called `name` to ask for beside `targets` targets."""
    counts = snapshot.drafters[name]
    pays = _pays(settings, snapshot, name)
    if pays:
        state = replace(state, trials=0, paused_load=None)
    wish = _wish(settings, state, snapshot, name, pays)
    if wish > 0:
        wish = max(wish, math.ceil(settings.least_per_target * targets))
    wish = min(wish, math.ceil(settings.most_per_target * targets))
    damping, decision = damped(state.damping, settings.limits, snapshot.now_s, counts.wanted, wish)
    state = replace(state, damping=damping)
    if pays is False and decision < counts.wanted:
        state = _paused(settings, state, snapshot)
    return state, decision


def _pays(settings: DrafterSettings, snapshot: ServiceSnapshot, name: str) -> bool | None:
    """Whether drafting pays now; None where that cannot be told, because nothing runs or the drafters are fresh."""
    load, pool = snapshot.load, snapshot.load.drafter_pool(name)
    if snapshot.drafters[name].usable == 0 or not pool.workers or load.verifications < ENOUGH_VERIFICATIONS:
        return None
    return pool.benched < pool.workers and load.draft_tokens >= settings.least_draft_tokens


def _wish(
    settings: DrafterSettings, state: DrafterState, snapshot: ServiceSnapshot, name: str, pays: bool | None
) -> int:
    counts, load = snapshot.drafters[name], snapshot.load
    if load.streams == 0:
        return 0
    if counts.wanted == 0:
        return 1 if _may_try(state, snapshot) else 0
    if pays is False:
        return 0
    usable = counts.usable
    if pays is None:
        return counts.wanted
    if _one_less_does(settings, snapshot, usable):
        return usable - 1
    # While drafters start, what is measured is the wait that they will relieve.
    too_few = counts.settled and _too_few(settings, snapshot, usable)
    return usable + max(1, usable // 2) if too_few else counts.wanted


def _may_try(state: DrafterState, snapshot: ServiceSnapshot) -> bool:
    if state.paused_load is None:
        return True
    return snapshot.now_s >= state.retry_at_s or snapshot.sequences_per_target <= EASED * state.paused_load


def _too_few(settings: DrafterSettings, snapshot: ServiceSnapshot, usable: int) -> bool:
    """Whether more drafters would help. One that drafts for one sequence alone is waited for, but not contended."""
    load = snapshot.load
    contended = load.drafters_busy >= CONTENDED * usable
    waited = load.exposed_draft_wait > settings.exposed_wait and contended
    saturated = load.drafters_busy >= SATURATED * usable
    return waited or saturated or load.late_drafts > settings.late_drafts or load.undrafted > 0


def _one_less_does(settings: DrafterSettings, snapshot: ServiceSnapshot, usable: int) -> bool:
    if usable <= 1:
        return False
    load, spread = snapshot.load, usable / (usable - 1)
    idle = load.drafters_busy <= CONTENDED * (1 - BAND) * (usable - 1)
    hidden = load.exposed_draft_wait * spread <= settings.exposed_wait * (1 - BAND)
    in_time = load.late_drafts * spread <= settings.late_drafts * (1 - BAND)
    return idle and in_time and (hidden or load.drafters_busy <= QUIET) and not load.undrafted


def _paused(settings: DrafterSettings, state: DrafterState, snapshot: ServiceSnapshot) -> DrafterState:
    """Note why drafters are given up. A load that stays is no reason to try them again soon, nor one tried in vain."""
    load = snapshot.sequences_per_target
    wait_s = settings.retry_s * 2 ** min(state.trials, MOST_DOUBLINGS)
    return replace(
        state,
        paused_load=load if state.paused_load is None else min(load, state.paused_load),
        retry_at_s=snapshot.now_s + wait_s,
        trials=state.trials + 1,
    )
