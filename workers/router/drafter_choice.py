"""Which drafter a new sequence gets: for each class of traffic the one whose drafts are accepted, found by trying."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.router.acceptance import judged

MEMORY_VERIFICATIONS = 500.0
"""Evidence fades within about so many verifications of a class, whichever drafter they were of."""
MOST_CLASSES = 1024


@dataclass(slots=True)
class _Evidence:
    """Drafts accepted and rejected, discounted up to the class's verification number `at`."""

    accepted: float = 0.0
    rejected: float = 0.0
    at: int = 0

    def fade(self, now: int, keep: float) -> None:
        kept = keep ** (now - self.at)
        self.accepted, self.rejected, self.at = self.accepted * kept, self.rejected * kept, now


@dataclass(slots=True)
class _TrafficClass:
    verifications: int = 0
    by_name: dict[str, _Evidence] = field(default_factory=dict)


class DrafterChoice:
    """Thompson sampling with discounted counts (Thompson 1933; Raj and Kalyani 2017 for the discount).

    A drafter is chosen with the probability that its acceptance rate is the highest, as far as is known: for each, a
    rate is drawn from the beta distribution of its evidence, and the highest wins. Evidence of all drafters of a class
    fades as the class goes on, so that one that was bad is tried again, and one that has become bad is left.
    """

    def __init__(
        self,
        seed: int = 0,
        memory_verifications: float = MEMORY_VERIFICATIONS,
        most_classes: int = MOST_CLASSES,
    ) -> None:
        """Raise ValueError if `memory_verifications` is not over 1 or `most_classes` not positive."""
        if memory_verifications <= 1:
            raise ValueError(f"memory_verifications must be over 1, not {memory_verifications}")
        if most_classes < 1:
            raise ValueError(f"most_classes must be at least 1, not {most_classes}")
        self._random = random.Random(seed)
        self._keep = 1 - 1 / memory_verifications
        self._most_classes = most_classes
        self._classes: OrderedDict[str, _TrafficClass] = OrderedDict()

    def choose(self, traffic_class: str, names: Sequence[str]) -> str:
        """Return one of `names`, the drafters that are available. Raises ValueError if there are none."""
        if not names:
            raise ValueError("names must not be empty")
        if len(names) == 1:
            return names[0]
        known = self._known(traffic_class)
        # In order of their names, so that the draws do not depend on the order in which drafters registered.
        drawn = {name: self._draw(known, name) for name in sorted(set(names))}
        return max(drawn, key=lambda name: drawn[name])

    def observe(self, traffic_class: str, name: str, drafted: int, accepted: int) -> None:
        """Note one verification of a chain of `drafted` tokens by the drafter; one without drafts teaches nothing."""
        trials = judged(drafted, accepted)
        if trials == 0:
            return
        known = self._known(traffic_class)
        known.verifications += 1
        evidence = known.by_name.setdefault(name, _Evidence(at=known.verifications))
        evidence.fade(known.verifications, self._keep)
        evidence.accepted += accepted
        evidence.rejected += trials - accepted

    def _known(self, traffic_class: str) -> _TrafficClass:
        """What is known of the class; the class not used for longest makes room for a new one."""
        known = self._classes.setdefault(traffic_class, _TrafficClass())
        self._classes.move_to_end(traffic_class)
        if len(self._classes) > self._most_classes:
            self._classes.popitem(last=False)
        return known

    def _draw(self, known: _TrafficClass, name: str) -> float:
        evidence = known.by_name.get(name)
        if evidence is None:
            return self._random.betavariate(1, 1)
        evidence.fade(known.verifications, self._keep)
        return self._random.betavariate(1 + evidence.accepted, 1 + evidence.rejected)
