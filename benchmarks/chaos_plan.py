"""What goes wrong when, in a failure drill: drawn from a seed, before anything runs. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What may befall a service. Stopped processes go on after a while, and nodes that were removed come back."""

    DRAFTER_KILLED = "drafter killed"
    TARGET_KILLED = "target killed"
    RANK_KILLED = "rank of a target killed"
    ROUTER_KILLED = "router killed"
    DRAFTER_STOPPED = "drafter stopped"
    TARGET_STOPPED = "target stopped"
    RANK_STOPPED = "rank of a target stopped"
    ROUTER_STOPPED = "router stopped"
    MESSAGES_DROPPED = "messages dropped"
    MESSAGES_DELAYED = "messages delayed"
    MESSAGES_DOUBLED = "messages doubled"
    NODE_REMOVED = "node removed"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at_s` seconds after the start, for `lasts_s` seconds where it passes by itself.

    `pick` (0 to 1) chooses among the processes or nodes that it can befall then.
    """

    at_s: float
    kind: FaultKind
    pick: float
    lasts_s: float

    def chosen(self, among: Sequence[str]) -> str | None:
        """Return the one of `among` that it befalls; None if there is none."""
        return sorted(among)[int(self.pick * len(among))] if among else None


SHORTEST_S, LONGEST_S = 0.5, 4.0


def kinds_of(ranks: int, nodes: bool) -> tuple[FaultKind, ...]:
    """Return what can befall a service whose targets have so many ranks, on several nodes or on one machine."""
    without = set() if ranks > 1 else {FaultKind.RANK_KILLED, FaultKind.RANK_STOPPED}
    if not nodes:
        without.add(FaultKind.NODE_REMOVED)
    return tuple(kind for kind in FaultKind if kind not in without)


def fault_plan(seed: int, seconds: float, every_s: float, kinds: Sequence[FaultKind]) -> tuple[Fault, ...]:
    """Return one fault in each period of `every_s` seconds, the same for the same arguments.

    Every kind comes before any comes again, each time in another order. The last period stays free of faults.
    """
    chance, left, faults = random.Random(seed), list[FaultKind](), list[Fault]()
    for period in range(int(seconds / every_s) - 1):
        if not left:
            left = chance.sample(list(kinds), len(kinds))
        at_s = (period + chance.uniform(0.0, 0.5)) * every_s
        faults.append(Fault(at_s, left.pop(), chance.random(), chance.uniform(SHORTEST_S, LONGEST_S)))
    return tuple(faults)
