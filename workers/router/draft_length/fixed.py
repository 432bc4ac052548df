"""Draft as much as is allowed, always."""

from collections.abc import Sequence

from workers.router.draft_length.base import DraftCandidate, DraftPlan, LaneView


class FixedPolicy:
    """Every sequence gets its limit, in a fixed number of groups."""

    def __init__(self, groups: int = 1) -> None:
        self._groups = groups

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """Return the limits."""
        return DraftPlan({candidate.sequence_id: candidate.limit for candidate in candidates}, self._groups)

    def forget(self, sequence_id: int) -> None:
        """Nothing is remembered."""
