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
    merged_load,
)
from cluster.shards import Sharding
from workers.messages import RouterLoad

logger = logging.getLogger("ray.serve")
TARGETS, INGRESS, ROUTER = "targets", "ingress", "router"
DRAFTERS = "drafters/"
DECIDE_EVERY_S = 0.5
STALE_AFTER_INTERVALS, STALE_AFTER_S = 6, 30.0
"""What a router told so many intervals ago, and so long ago, says nothing of now: then nothing changes."""
_ONE_ROUTER = Sharding()
_shared: dict[str, "Autoscaler"] = {}


def shared_autoscaler(
    application: str, settings: ApplicationSettings, interval_s: float, sharding: Sharding
) -> "Autoscaler":
    """Return the application's autoscaler; one with other settings takes the place of its predecessor."""
    known = _shared.get(application)
    if known is None or (known.settings, known.interval_s, known.sharding) != (settings, interval_s, sharding):
        known = _shared[application] = Autoscaler(settings, interval_s, sharding)
    return known


@dataclass(frozen=True, slots=True)
class PoolOfRouter:
    """Whose replicas a policy decides: those of `pool` that belong to the router with this index."""

    pool: str
    index: int
    sharding: Sharding


@dataclass(slots=True)
class _Pool:
    """A router's part of a pool as its policy saw it last: replicas asked for, and since when each runs that does."""

    wanted: int = 0
    since_s: dict[Hashable, float] = field(default_factory=dict)


class Autoscaler:
    """One application's. Times are those of one clock, which callers hand in; `index` is that of a router.

    Pools are sized as a whole, by the load of all routers together, and dealt out to the routers.
    """

    def __init__(self, settings: ApplicationSettings, interval_s: float, sharding: Sharding = _ONE_ROUTER) -> None:
        self.settings = settings
        self.interval_s = interval_s
        self.sharding = sharding
        self._loads: dict[int, tuple[float, RouterLoad]] = {}
        self._pools: dict[tuple[str, int], _Pool] = {}
        self._state = ApplicationState()
        self._changes: dict[tuple[str, int], tuple[int, int]] = {}
        self._decided_s = float("-inf")

    def see_pool(self, pool: str, wanted: int, running: Collection[Hashable], now_s: float, index: int = 0) -> None:
        """Note how many replicas a router's part of a pool has been asked for, and which run."""
        seen = self._pools.setdefault((pool, index), _Pool())
        seen.wanted = wanted
        seen.since_s = {replica: seen.since_s.get(replica, now_s) for replica in running}

    def see_load(self, load: RouterLoad, measured_s: float, now_s: float, index: int = 0) -> None:
        """Decide anew, unless that has just been done, a router's load is of long ago, or a part was not seen yet."""
        self._loads[index] = (measured_s, load)
        oldest_s = min(measured_s for measured_s, _ in self._loads.values())
        if now_s - oldest_s > max(STALE_AFTER_S, STALE_AFTER_INTERVALS * self.interval_s):
            self._changes = {}
            return
        if now_s - self._decided_s < DECIDE_EVERY_S or not self._knows_all():
            return
        self._decided_s = now_s
        merged = merged_load([self._loads[router][1] for router in sorted(self._loads)])
        self._state, decisions = decide(self.settings, self._state, self._snapshot(merged, now_s))
        self._remember(decisions, merged)

    def decision(self, pool: str, wanted: int, index: int = 0) -> int:
        """Return the replicas that a router's part of a pool should have, of which `wanted` are asked for already.

        A decision is a change of the number that it was made for; once that has come to pass it says nothing more.
        """
        before, after = self._changes.get((pool, index), (wanted, wanted))
        return after if before == wanted else wanted

    def _knows_all(self) -> bool:
        scaled = {(pool, index) for pool in self._scaled() for index in range(self._parts(pool))}
        return len(self._loads) == self.sharding.routers and scaled <= self._pools.keys()

    def _parts(self, pool: str) -> int:
        return 1 if pool == INGRESS else self.sharding.routers

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
        parts = [part for (name, _), part in self._pools.items() if name == pool]
        if not parts:
            return ReplicaCounts(otherwise, otherwise)
        ages_s = [now_s - since for part in parts for since in part.since_s.values()]
        return ReplicaCounts(sum(part.wanted for part in parts), sum(age >= limits.warm_up_s for age in ages_s))

    def _remember(self, decisions: Decisions, load: RouterLoad) -> None:
        decided = {TARGETS: self.sharding.targets(decisions.targets), INGRESS: (decisions.ingress,)}
        for name, replicas in decisions.drafters.items():
            decided[DRAFTERS + name] = self.sharding.drafters(replicas, decisions.targets)
        self._changes = {
            (pool, index): (self._pools[pool, index].wanted, decided[pool][index])
            for pool in self._scaled()
            for index in range(self._parts(pool))
        }
        for (pool, index), (before, after) in self._changes.items():
            if before != after:
                of = f" of router {index}" if self._parts(pool) > 1 else ""
                logger.info("autoscaling %s%s from %d to %d replicas: %s", pool, of, before, after, load)
