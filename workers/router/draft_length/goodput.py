"""The draft lengths that commit the most tokens per time, held as long as no others are clearly better."""

from collections.abc import Sequence

import numpy as np

from workers.router.draft_length.base import DraftCandidate, DraftPlan, LaneView
from workers.router.draft_length.probing import PROBE_EVERY, Probing
from workers.router.goodput import Floats, Ints, LengthPlan, best_plan, evaluate_lengths

COLD_LENGTH = 2
SWITCH_GAIN = 0.03
SWITCH_PLANS = 3
SMALL_GAIN = 0.003
SMALL_GAIN_PLANS = 32
SEQUENCES_PER_ROUND = 8
"""While nobody joins, the lengths of n sequences are compared in one of 1 + n / 8 plans: that takes longer for more of
them, and one round's news changes less."""
SEARCH_EVERY_MS = 30.0
"""Nor are they compared more often: it takes a few tenths of a millisecond, for which short rounds would wait."""


class GoodputPolicy:
    """Plans the whole lane, by the observed acceptance of its sequences and the observed times of its workers.

    The lengths in use are compared with the best ones under the same rates and times, and replaced when they fall
    behind by more than `switch_gain` in `SWITCH_PLANS` plans in a row, or by more than `SMALL_GAIN` in
    `SMALL_GAIN_PLANS`: noise changes nothing, and no loss stays. A sequence that joins gets its best at once,
    and the others keep what they have. Until times are known, up to `COLD_LENGTH` tokens are drafted.
    """

    def __init__(self, switch_gain: float = SWITCH_GAIN, probe_every: int = PROBE_EVERY) -> None:
        """Raise ValueError if `switch_gain` is negative or `probe_every` under 2."""
        if switch_gain < 0:
            raise ValueError(f"switch_gain must not be negative, not {switch_gain}")
        self._switch_gain = switch_gain
        self._probing = Probing(probe_every)
        self._held: dict[int, int] = {}
        self._groups = 1
        self._plans_since = 0
        self._round_ms = 0.0
        self._behind = 0
        self._a_little_behind = 0

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """Return the lengths in use, the best ones if it is time to switch, or for one round those of a probe."""
        if view.times is None:
            return DraftPlan({each.sequence_id: min(each.limit, COLD_LENGTH) for each in candidates})
        if not candidates:
            return DraftPlan({})
        self._plans_since += 1
        has_new = any(candidate.sequence_id not in self._held for candidate in candidates)
        is_search = has_new or (
            self._plans_since > len(candidates) // SEQUENCES_PER_ROUND
            and self._plans_since * self._round_ms >= SEARCH_EVERY_MS
        )
        if not is_search and not self._probing.is_due:
            self._probing.wait()
            return DraftPlan(self._in_use(candidates), self._groups_for(candidates, view))
        rates = np.array([candidate.rate for candidate in candidates])
        limits = np.array([candidate.limit for candidate in candidates], np.int64)
        plan = self._search(candidates, rates, limits, view) if is_search else self._promise(candidates, rates, view)
        lengths = self._probing.apply(candidates, rates, plan, view)
        ids = [candidate.sequence_id for candidate in candidates]
        return DraftPlan(dict(zip(ids, lengths.tolist(), strict=True)), plan.groups)

    def forget(self, sequence_id: int) -> None:
        """Drop the sequence's length; the others keep theirs."""
        self._held.pop(sequence_id, None)
        self._probing.forget(sequence_id)

    def _in_use(self, candidates: Sequence[DraftCandidate]) -> dict[int, int]:
        return {each.sequence_id: min(self._held[each.sequence_id], each.limit) for each in candidates}

    def _groups_for(self, candidates: Sequence[DraftCandidate], view: LaneView) -> int:
        return max(1, min(self._groups, view.max_groups, len(candidates)))

    def _promise(self, candidates: Sequence[DraftCandidate], rates: Floats, view: LaneView) -> LengthPlan:
        """What the lengths in use promise."""
        assert view.times is not None
        lengths = np.array(list(self._in_use(candidates).values()), np.int64)
        return evaluate_lengths(rates, lengths, view.times, self._groups_for(candidates, view), view.hidden_ms)

    def _search(self, candidates: Sequence[DraftCandidate], rates: Floats, limits: Ints, view: LaneView) -> LengthPlan:
        """The lengths in use, or the best ones if these have been better for long enough."""
        assert view.times is not None
        best = best_plan(rates, limits, view.times, view.max_groups, view.hidden_ms)
        plan = self._choose(candidates, best, rates, limits, view)
        self._plans_since, self._round_ms = 0, plan.round_ms
        self._held.update(zip((each.sequence_id for each in candidates), plan.draft_tokens.tolist(), strict=True))
        return plan

    def _choose(
        self, candidates: Sequence[DraftCandidate], best: LengthPlan, rates: Floats, limits: Ints, view: LaneView
    ) -> LengthPlan:
        assert view.times is not None
        if not any(candidate.sequence_id in self._held for candidate in candidates):
            return self._switch(best)
        held = [
            self._held.get(candidate.sequence_id, new)
            for candidate, new in zip(candidates, best.draft_tokens.tolist(), strict=True)
        ]
        groups = self._groups_for(candidates, view)
        now = evaluate_lengths(rates, np.minimum(held, limits), view.times, groups, view.hidden_ms)
        self._behind = self._behind + 1 if best.goodput > now.goodput * (1 + self._switch_gain) else 0
        a_little = best.goodput > now.goodput * (1 + SMALL_GAIN)
        self._a_little_behind = self._a_little_behind + self._plans_since if a_little else 0
        if self._behind >= SWITCH_PLANS or self._a_little_behind >= SMALL_GAIN_PLANS:
            return self._switch(best)
        return now

    def _switch(self, best: LengthPlan) -> LengthPlan:
        self._behind = self._a_little_behind = 0
        self._groups = best.groups
        return best
