"""Now and then a draft length that is not the best known one, to notice when it has become the best."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workers.router.draft_length.base import DraftCandidate, LaneView
from workers.router.goodput import Floats, Ints, LengthPlan, RoundTimes, evaluate_lengths
from workers.router.smoothed import Smoothed

PROBE_EVERY = 32
BUDGET = 0.003
"""The share of the lane's time that probes may cost, by what is known of rates and times."""
MOST_SAVED_ROUNDS = 2.0
FIRST_PAUSE = 8
LONGEST_PAUSE = 1024
SUCCESS_SMOOTHING = 1 / 8


@dataclass(slots=True)
class _Silent:
    """A sequence without drafts: when to try one again, and how long to wait after that if it fails."""

    due: int
    pause: int = FIRST_PAUSE
    probed_after: int | None = None
    """How many verifications it had when it was last probed; None if the outcome is known."""
    length: int = 1


class Probing:
    """Changes the lengths of a few rounds. What that costs is saved up before: `BUDGET` of every round's time.

    Every `probe_every` plans, the sequences that share the most common draft length get one token more, or one less, in
    turn. A sequence without drafts gets one or two after a pause, which doubles as long as they are rejected. Where
    such first drafts have lately been accepted more often than is known of the sequences, the next cost that much
    less: when something has changed for all of them, many are tried at once.
    """

    def __init__(self, probe_every: int = PROBE_EVERY) -> None:
        """Raise ValueError if `probe_every` is under 2."""
        if probe_every < 2:
            raise ValueError(f"probe_every must be at least 2, not {probe_every}")
        self._probe_every = probe_every
        self._silent: dict[int, _Silent] = {}
        self._plans = 0
        self._next_neighbours = probe_every
        self._round_ms = 0.0
        self._step = 1
        self._saved_ms = 0.0
        self._needed_ms = 0.0
        self._successes = Smoothed(count=1, smoothing=SUCCESS_SMOOTHING)

    def forget(self, sequence_id: int) -> None:
        """Drop what is remembered of a sequence."""
        self._silent.pop(sequence_id, None)

    @property
    def is_due(self) -> bool:
        """Whether the next plan may be one for a probe, or shows what came of one."""
        next_plan, silent = self._plans + 1, self._silent.values()
        if next_plan >= self._next_neighbours or any(each.probed_after is not None for each in silent):
            return True
        return self._saved_ms >= min(self._needed_ms, self._most_saved_ms) and any(
            each.due <= next_plan for each in silent
        )

    def wait(self) -> None:
        """A round of the lengths in use goes by."""
        self._plans += 1
        self._save()

    @property
    def _most_saved_ms(self) -> float:
        return MOST_SAVED_ROUNDS * self._round_ms

    def _save(self) -> None:
        self._saved_ms = min(self._saved_ms + BUDGET * self._round_ms, self._most_saved_ms)

    def apply(self, candidates: Sequence[DraftCandidate], rates: Floats, plan: LengthPlan, view: LaneView) -> Ints:
        """Return the lengths to use in this round, shape [n]: those of `plan`, or those of a probe of it."""
        assert view.times is not None
        self._plans += 1
        self._round_ms = plan.round_ms
        self._save()
        due = self._due(candidates, plan.draft_tokens)
        if self._plans >= self._next_neighbours:
            self._next_neighbours = self._plans + self._probe_every
            options, most_ms = list(self._neighbours(candidates, plan.draft_tokens)), float("inf")
        elif due and self._saved_ms >= min(self._needed_ms, self._most_saved_ms):
            options, most_ms = list(self._first_drafts(plan.draft_tokens, due)), self._most_saved_ms
        else:
            return plan.draft_tokens
        self._needed_ms = 0.0
        hopes = np.where(plan.draft_tokens == 0, np.maximum(rates, self._successes.value), rates)
        for lengths in options:
            cost_ms = self._cost_ms(hopes, lengths, plan, view.times, view.hidden_ms)
            # What is known of the times may be wrong, or out of date, which shows only if somebody is drafted for. The
            # smallest probe of all is made once nothing more is saved up, and paid for afterwards.
            price_ms = min(cost_ms, most_ms) if lengths is options[-1] else cost_ms
            if price_ms <= self._saved_ms:
                self._saved_ms -= cost_ms
                self._note(candidates, plan.draft_tokens, lengths)
                return lengths
            self._needed_ms = price_ms
        return plan.draft_tokens

    def _cost_ms(self, rates: Floats, lengths: Ints, plan: LengthPlan, times: RoundTimes, hidden_ms: float) -> float:
        """The time a round of these lengths takes, less the time in which the plan commits as many tokens."""
        probe = evaluate_lengths(rates, lengths, times, plan.groups, hidden_ms)
        return max(0.0, probe.round_ms * (1 - probe.goodput / plan.goodput))

    def _neighbours(self, candidates: Sequence[DraftCandidate], lengths: Ints) -> Iterator[Ints]:
        """One token more or less, whose turn it is first, for all sequences of the most common length or for one.

        That may be a round without drafts: how fast these are is not known otherwise while there always are some.
        """
        common = Counter(int(length) for length in lengths if length > 0).most_common(1)
        self._step = -self._step
        if not common:
            return
        limits = np.array([candidate.limit for candidate in candidates])
        same = lengths == common[0][0]
        for step in (self._step, -self._step):
            changed = np.where(same, np.clip(lengths + step, 0, limits), lengths)
            moved = np.flatnonzero(changed != lengths)
            if len(moved):
                yield changed
                yield np.where(np.arange(len(lengths)) == moved[0], changed, lengths)

    def _due(self, candidates: Sequence[DraftCandidate], lengths: Ints) -> list[tuple[int, int]]:
        """The rows of the sequences without drafts whose pause is over, longest over first, and how many to draft."""
        due = []
        for row, (candidate, length) in enumerate(zip(candidates, lengths.tolist(), strict=True)):
            if length > 0 or candidate.limit <= 0:
                self._silent.pop(candidate.sequence_id, None)
                continue
            silent = self._silent.get(candidate.sequence_id)
            if silent is None:
                silent = self._silent[candidate.sequence_id] = _Silent(self._plans + FIRST_PAUSE)
            self._learn(silent, candidate)
            if silent.due <= self._plans:
                due.append((silent.due, row, min(silent.length, candidate.limit)))
        return [(row, length) for _, row, length in sorted(due)]

    def _learn(self, silent: _Silent, candidate: DraftCandidate) -> None:
        if silent.probed_after is None or candidate.verifications <= silent.probed_after:
            return
        if candidate.drafted > 0:
            succeeded = candidate.accepted == candidate.drafted
            silent.pause = FIRST_PAUSE if succeeded else min(2 * silent.pause, LONGEST_PAUSE)
            silent.length = 2 if succeeded else 1
            self._successes.observe(succeeded)
            if succeeded:
                # Whatever made the others' drafts fail may be over for them, too.
                for other in self._silent.values():
                    other.due = min(other.due, self._plans + FIRST_PAUSE)
        silent.probed_after = None
        silent.due = self._plans + silent.pause

    def _first_drafts(self, lengths: Ints, due: list[tuple[int, int]]) -> Iterator[Ints]:
        """Drafts for all that are due, for half of them, and so on down to one: together they share draft steps."""
        count = len(due)
        while count:
            changed = lengths.copy()
            for row, length in due[:count]:
                changed[row] = length
            yield changed
            count //= 2

    def _note(self, candidates: Sequence[DraftCandidate], before: Ints, after: Ints) -> None:
        """Remember which sequences without drafts get some, and when to try the next if nothing is heard of these."""
        for row in np.flatnonzero((before == 0) & (after > 0)).tolist():
            silent = self._silent[candidates[row].sequence_id]
            silent.probed_after = candidates[row].verifications
            silent.due = self._plans + silent.pause
