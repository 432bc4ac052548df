"""How often drafts are accepted: per sequence, per drafter, and per drafter and class of traffic."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

COLD_RATE = 0.6
"""What is expected of a drafter nobody has seen at work."""
COLD_WEIGHT = 8.0
SEQUENCE_WEIGHT = 8.0
SEQUENCE_MEMORY_TOKENS = 64.0
DRAFTER_MEMORY_TOKENS = 512.0
MOST_CLASSES = 1024
SMALLEST_RATE = 1e-3
"""Rates stay this far from 0 and 1: no number of observations makes the next draft certain."""


def judged(drafted: int, accepted: int) -> int:
    """Return how many drafts of a chain were put to the test: those up to the first one that was rejected.

    Raises:
        ValueError: If more were accepted than drafted, or either is negative.
    """
    if not 0 <= accepted <= drafted:
        raise ValueError(f"accepted ({accepted}) must lie between 0 and drafted ({drafted})")
    return accepted + (accepted < drafted)


class AcceptanceEstimate:
    """The probability that a draft is accepted if all drafts before it were.

    An exponential average over the drafts that were judged, with a memory of about `memory_tokens` of them. It begins
    as if `prior_weight` drafts had been seen, of which the share `prior_rate` was accepted; like all that was seen,
    the prior fades. Drafts behind a rejected one say nothing and are not counted, so that the estimate does not depend
    on how many are drafted (a geometric distribution cut off at k).
    """

    __slots__ = ("_accepted", "_judged", "_keep")

    def __init__(
        self,
        prior_rate: float = COLD_RATE,
        prior_weight: float = SEQUENCE_WEIGHT,
        memory_tokens: float = SEQUENCE_MEMORY_TOKENS,
    ) -> None:
        """Raise ValueError if the rate is outside [0, 1], or a weight is not positive, or a memory not over 1."""
        if not 0 <= prior_rate <= 1:
            raise ValueError(f"prior_rate must lie between 0 and 1, not {prior_rate}")
        if prior_weight <= 0 or memory_tokens <= 1:
            raise ValueError("prior_weight must be positive and memory_tokens over 1")
        self._judged = prior_weight
        self._accepted = prior_rate * prior_weight
        self._keep = 1 - 1 / memory_tokens

    def observe(self, drafted: int, accepted: int) -> None:
        """Note one verification of a chain of `drafted` tokens (0: nothing is learned)."""
        trials = judged(drafted, accepted)
        if trials:
            kept = self._keep**trials
            self._judged = self._judged * kept + trials
            self._accepted = self._accepted * kept + accepted

    @property
    def rate(self) -> float:
        """The estimate, strictly between 0 and 1."""
        return min(max(self._accepted / self._judged, SMALLEST_RATE), 1 - SMALLEST_RATE)


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    """What one drafter has achieved so far; sums since it was first seen, `rate` of the recent past.

    Position j of `drafted_per_position` counts proposals of more than j tokens, of `accepted_per_position` those
    with more than j accepted.
    """

    drafter_id: str
    rate: float
    verifications: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    rate_by_class: Mapping[str, float]

    @property
    def accepted_length(self) -> float:
        """Tokens committed per verification that had drafts: the accepted ones and one of the target's own."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else 1.0


@dataclass(frozen=True, slots=True)
class AcceptanceSnapshot:
    """All drafters that were observed, in order of their ids."""

    drafters: tuple[DrafterAcceptance, ...]


def _drafter_estimate() -> AcceptanceEstimate:
    return AcceptanceEstimate(COLD_RATE, COLD_WEIGHT, DRAFTER_MEMORY_TOKENS)


def _no_counts() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class _Record:
    """The state of one drafter; counts by position have shape [longest proposal so far]."""

    estimate: AcceptanceEstimate = field(default_factory=_drafter_estimate)
    verifications: int = 0
    drafted: NDArray[np.int64] = field(default_factory=_no_counts)
    accepted: NDArray[np.int64] = field(default_factory=_no_counts)

    def observe(self, drafted: int, accepted: int) -> None:
        self.estimate.observe(drafted, accepted)
        if drafted > len(self.drafted):
            longer = drafted - len(self.drafted)
            self.drafted, self.accepted = np.pad(self.drafted, (0, longer)), np.pad(self.accepted, (0, longer))
        self.verifications += 1
        self.drafted[:drafted] += 1
        self.accepted[:accepted] += 1


class AcceptanceBook:
    """Observed acceptance of every drafter, and what to expect of a sequence that begins.

    A class of traffic that was never seen starts from its drafter's rate, a drafter from `COLD_RATE`. At most
    `most_classes` pairs of drafter and class are remembered; the one not seen for longest goes first.
    """

    def __init__(self, most_classes: int = MOST_CLASSES) -> None:
        self._most_classes = most_classes
        self._records: dict[str, _Record] = {}
        self._classes: OrderedDict[tuple[str, str], AcceptanceEstimate] = OrderedDict()

    def observe(self, drafter_id: str, traffic_class: str, drafted: int, accepted: int) -> None:
        """Note one verification of a chain of `drafted` tokens; one without drafts leaves no trace."""
        if judged(drafted, accepted) == 0:
            return
        record = self._records.setdefault(drafter_id, _Record())
        key = (drafter_id, traffic_class)
        if key not in self._classes:
            self._classes[key] = AcceptanceEstimate(record.estimate.rate, COLD_WEIGHT, DRAFTER_MEMORY_TOKENS)
            if len(self._classes) > self._most_classes:
                self._classes.popitem(last=False)
        record.observe(drafted, accepted)
        self._classes[key].observe(drafted, accepted)
        self._classes.move_to_end(key)

    def rate(self, drafter_id: str, traffic_class: str) -> float:
        """Return the acceptance rate to expect of the drafter for such traffic."""
        known = self._classes.get((drafter_id, traffic_class))
        if known is not None:
            return known.rate
        record = self._records.get(drafter_id)
        return COLD_RATE if record is None else record.estimate.rate

    def sequence_estimate(self, drafter_id: str, traffic_class: str) -> AcceptanceEstimate:
        """Return the estimate a sequence starts with: `rate`, for as much as `SEQUENCE_WEIGHT` drafts would say."""
        return AcceptanceEstimate(self.rate(drafter_id, traffic_class))

    def forget(self, drafter_id: str) -> None:
        """Drop all that is known of a drafter that left for good."""
        self._records.pop(drafter_id, None)
        for key in [key for key in self._classes if key[0] == drafter_id]:
            del self._classes[key]

    def snapshot(self) -> AcceptanceSnapshot:
        """Return what is known now; later observations do not change it."""
        return AcceptanceSnapshot(tuple(self._describe(drafter_id) for drafter_id in sorted(self._records)))

    def _describe(self, drafter_id: str) -> DrafterAcceptance:
        record = self._records[drafter_id]
        return DrafterAcceptance(
            drafter_id,
            record.estimate.rate,
            record.verifications,
            int(record.drafted.sum()),
            int(record.accepted.sum()),
            tuple(record.drafted.tolist()),
            tuple(record.accepted.tolist()),
            {name: estimate.rate for (owner, name), estimate in self._classes.items() if owner == drafter_id},
        )
