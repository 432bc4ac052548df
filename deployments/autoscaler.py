"""Decides for all pools of an application from what the policies of its deployments see, inside Serve's controller.

Serve calls one policy per deployment, and shows it that deployment only. What drafters, targets and ingress need is
known to the router, and drafters must keep in proportion to targets; so the policies of an application share this
object. It has to be found by name: Serve makes the policies itself, from their import path.
"""

import logging
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from cluster.autoscaling import (
    ApplicationSettings,
    ApplicationState,
    Decisions,
    ReplicaCounts,
    ScalingLimits,
    ServiceSnapshot,
    decide,
)
from workers.messages import RouterLoad

logger = logging.getLogger("ray.serve")
TARGETS, INGRESS, ROUTER = "targets", "ingress", "router"
DRAFTERS = "drafters/"
DECIDE_EVERY_S = 0.5
STALE_AFTER_INTERVALS, STALE_AFTER_S = 6, 30.0
"""What the router told so many intervals ago, and so long ago, says nothing of now: then nothing changes."""
_shared: dict[str, "Autoscaler"] = {}


def shared_autoscaler(application: str, settings: ApplicationSettings, interval_s: float) -> "Autoscaler":
    """Return the application's autoscaler; one with other settings takes the place of its predecessor."""
    known = _shared.get(application)
    if known is None or (known.settings, known.interval_s) != (settings, interval_s):
        known = _shared[application] = Autoscaler(settings, interval_s)
    return known


@dataclass(slots=True)
class _Pool:
    """A pool as its policy saw it last: replicas asked for, and since when each that runs has been running."""

    wanted: int = 0
    since_s: dict[Hashable, float] = field(default_factory=dict)

    def counts(self, limits: ScalingLimits, now_s: float) -> ReplicaCounts:
        warm = sum(now_s - since >= limits.warm_up_s for since in self.since_s.values())
        return ReplicaCounts(self.wanted, warm)


class Autoscaler:
    """One application's. Times are those of one clock, which callers hand in."""

    def __init__(self, settings: ApplicationSettings, interval_s: float) -> None:
        self.settings = settings
        self.interval_s = interval_s
        self._pools: dict[str, _Pool] = {}
        self._state = ApplicationState()
        self._changes: dict[str, tuple[int, int]] = {}
        self._decided_s = float("-inf")

    def see_pool(self, pool: str, wanted: int, running: Collection[Hashable], now_s: float) -> None:
        """Note how many replicas a pool has been asked for, and which run."""
        seen = self._pools.setdefault(pool, _Pool())
        seen.wanted = wanted
        seen.since_s = {replica: seen.since_s.get(replica, now_s) for replica in running}

    def see_load(self, load: RouterLoad, measured_s: float, now_s: float) -> None:
        """Decide anew, unless that has just been done, the load is of long ago, or a pool was not seen yet."""
        if now_s - measured_s > max(STALE_AFTER_S, STALE_AFTER_INTERVALS * self.interval_s):
            self._changes = {}
            return
        if now_s - self._decided_s < DECIDE_EVERY_S or not self._scaled() <= self._pools.keys():
            return
        self._decided_s = now_s
        snapshot = self._snapshot(load, now_s)
        self._state, decisions = decide(self.settings, self._state, snapshot)
        self._remember(decisions, load)

    def decision(self, pool: str, wanted: int) -> int:
        """Return the replicas that a pool should have, of which `wanted` are asked for already.

        A decision is a change of the number that it was made for; once that has come to pass it says nothing more.
        """
        before, after = self._changes.get(pool, (wanted, wanted))
        return after if before == wanted else wanted

    def _scaled(self) -> set[str]:
        drafters = {DRAFTERS + name for name in self.settings.drafters}
        others = {TARGETS: self.settings.targets, INGRESS: self.settings.ingress}
        return drafters | {name for name, settings in others.items() if settings is not None}

    def _snapshot(self, load: RouterLoad, now_s: float) -> ServiceSnapshot:
        settings = self.settings
        targets = ScalingLimits() if settings.targets is None else settings.targets.limits
        ingress = ScalingLimits() if settings.ingress is None else settings.ingress.limits
        fixed = {pool.name: ReplicaCounts(pool.workers, pool.workers) for pool in load.drafter_pools}
        drafters = {
            name: self._counts(DRAFTERS + name, each.limits, 0, now_s) for name, each in settings.drafters.items()
        }
        return ServiceSnapshot(
            now_s,
            load,
            self._counts(TARGETS, targets, len(load.kv_use), now_s),
            fixed | drafters,
            self._counts(INGRESS, ingress, 1, now_s),
        )

    def _counts(self, pool: str, limits: ScalingLimits, otherwise: int, now_s: float) -> ReplicaCounts:
        """Return a pool's counts; one that no policy sees has a fixed number, of which `otherwise` are registered."""
        seen = self._pools.get(pool)
        return ReplicaCounts(otherwise, otherwise) if seen is None else seen.counts(limits, now_s)

    def _remember(self, decisions: Decisions, load: RouterLoad) -> None:
        decided = {TARGETS: decisions.targets, INGRESS: decisions.ingress}
        decided |= {DRAFTERS + name: replicas for name, replicas in decisions.drafters.items()}
        self._changes = {name: (self._pools[name].wanted, decided[name]) for name in self._scaled()}
        for name, (before, after) in self._changes.items():
            if before != after:
                logger.info("autoscaling %s from %d to %d replicas: %s", name, before, after, load)
