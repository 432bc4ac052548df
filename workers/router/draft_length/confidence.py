"""Let the drafter decide: it stops where it no longer believes that the target will follow."""

from collections.abc import Sequence

from workers.router.draft_length.base import DraftCandidate, DraftPlan, LaneView

LEAST_CONFIDENCE = 0.4


class ConfidencePolicy:
    """Every sequence gets its limit; its chain ends early where the drafter's confidence falls under the least."""

    def __init__(self, least_confidence: float = LEAST_CONFIDENCE, groups: int = 1) -> None:
        """Raise ValueError if `least_confidence` is outside [0, 1]."""
        if not 0 <= least_confidence <= 1:
            raise ValueError(f"least_confidence must lie between 0 and 1, not {least_confidence}")
        self._least_confidence = least_confidence
        self._groups = groups

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """Return the limits, with the least confidence."""
        lengths = {candidate.sequence_id: candidate.limit for candidate in candidates}
        return DraftPlan(lengths, self._groups, self._least_confidence)

    def forget(self, sequence_id: int) -> None:
        """Nothing is remembered."""
