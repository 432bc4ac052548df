"""One token more when drafts are accepted, one less when they are not."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.router.draft_length.base import DraftCandidate, DraftPlan, LaneView

FIRST_LENGTH = 4
LONGER_ABOVE = 0.8
SHORTER_BELOW = 0.4


@dataclass(slots=True)
class _Window:
    length: int
    verifications: int


class AcceptanceWindowPolicy:
    """Keeps the acceptance of every sequence between two bounds by the length of its drafts, which is at least 1.

    The acceptance is the mean of the last verification's and of the observed rate, so that one lucky or unlucky round
    alone does not count for much. Lengths change by one token per verification.
    """

    def __init__(self, groups: int = 1) -> None:
        self._groups = groups
        self._windows: dict[int, _Window] = {}

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """Return the lengths after the candidates' last verifications."""
        return DraftPlan({each.sequence_id: self._length(each) for each in candidates}, self._groups)

    def forget(self, sequence_id: int) -> None:
        """Start anew should the sequence come back."""
        self._windows.pop(sequence_id, None)

    def _length(self, candidate: DraftCandidate) -> int:
        if candidate.limit <= 0:
            return 0
        first = _Window(FIRST_LENGTH, candidate.verifications)
        window = self._windows.setdefault(candidate.sequence_id, first)
        # Within the limit, so that a limit that falls and rises again is followed one step at a time.
        window.length = min(window.length, candidate.limit)
        if candidate.verifications > window.verifications and candidate.drafted > 0:
            acceptance = (candidate.accepted / candidate.drafted + candidate.rate) / 2
            step = (acceptance > LONGER_ABOVE) - (acceptance < SHORTER_BELOW)
            window.length = min(max(window.length + step, 1), candidate.limit)
        window.verifications = candidate.verifications
        return window.length
