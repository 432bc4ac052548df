"""What a lane drafts in its next rounds: it tells the policy what was observed, and keeps what that rests on."""

import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from statistics import mean

from workers.router.ahead import AheadBudget, AheadJudge, ahead_budget
from workers.router.cohorts import form_cohorts, random_cohorts
from workers.router.config import RouterConfig
from workers.router.draft_length import DraftCandidate, DraftLengthPolicy, DraftPlan, LaneView
from workers.router.goodput import RoundTimes
from workers.router.recent import Recent
from workers.router.roster import Roster
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.step_times import StepTimeFit, StepTimes
from workers.router.totals import RoundClock

LOOKUP_PROBE_ROUNDS = 16
"""Where looked-up drafts do not pay, one is tried in one of so many rounds."""
MOST_LOOKUPS = 32
LONGEST_LEARNING = 64
"""After so many plans cohorts take turns, though it is not known whether target and drafter share a device."""
RECENT_ROUNDS = 15
"""How many rounds the overhead is taken from."""


@dataclass(slots=True)
class LaneTimes:
    """Observed times of one target's rounds, ms.

    The overhead of rounds with drafts is kept apart, and what asking a drafter takes beside its computing: rounds
    without drafts would be thought as slow otherwise, and not be chosen where they are the best.
    """

    verify: StepTimes = field(default_factory=StepTimes)
    plain_overhead_ms: Recent = field(default_factory=lambda: Recent(RECENT_ROUNDS))
    drafted_overhead_ms: Recent = field(default_factory=lambda: Recent(RECENT_ROUNDS))
    asking_ms: Recent = field(default_factory=lambda: Recent(RECENT_ROUNDS))
    ahead: AheadJudge = field(default_factory=AheadJudge)

    def observe_step(self, tokens: int, ms: float, beside_drafting: bool, reads_prompts: bool) -> None:
        """Note how long a step of the target took. Beside drafting ahead it may have been slower than it need be."""
        alone = self.verify.fit_or_flat(tokens)
        if not beside_drafting or alone is None:
            self.verify.observe(tokens, ms)
        elif alone.time_ms(tokens) > 0 and not reads_prompts:
            self.ahead.slowdown.observe(ms / alone.time_ms(tokens))

    def observe_round(self, clock: RoundClock, alone: bool, drafted: bool, expected_draft_ms: float | None) -> None:
        """Note a finished round; `alone`: no other one was under way, so that its wait is all its own."""
        if not alone:
            return
        overhead = self.drafted_overhead_ms if drafted else self.plain_overhead_ms
        overhead.observe(max(0.0, clock.wall_ms() - clock.draft_wait_ms - clock.verify_compute_ms))
        if expected_draft_ms is None:
            return
        if clock.drafted_ahead:
            self.ahead.saved_ms.observe(expected_draft_ms + self.asking_ms.median - clock.draft_wait_ms)
        else:
            self.asking_ms.observe(max(0.0, clock.draft_wait_ms - clock.draft_compute_ms))

    def overhead_ms(self) -> float:
        """Return what a round without drafts takes beside its verification. Before there was one, what others take."""
        return (self.plain_overhead_ms if len(self.plain_overhead_ms) else self.drafted_overhead_ms).median

    def draft_overhead_ms(self) -> float:
        """Return what comes on top in a round with drafts, beside the drafter's computing."""
        return max(0.0, self.drafted_overhead_ms.median - self.overhead_ms()) + self.asking_ms.median


class DraftPlanner:
    """Chooses draft lengths and cohorts for the sequences of one target."""

    def __init__(self, policy: DraftLengthPolicy, roster: Roster, config: RouterConfig) -> None:
        self.times = LaneTimes()
        self._policy = policy
        self._roster = roster
        self._config = config
        self._cohorts: dict[int, int] = {}
        self._plans = 0

    def forget(self, sequence_id: int) -> None:
        """The sequence left the target."""
        self._cohorts.pop(sequence_id, None)
        self._policy.forget(sequence_id)

    def plan(self, running: Collection[RunningSequence]) -> DraftPlan:
        """Return the draft lengths of all sequences of the target, 0 for those that are not drafted for."""
        sequences = [each.sequence for each in running if each.wants_drafts]
        candidates = [candidate for sequence in sequences if (candidate := self._candidate(sequence)) is not None]
        times = self.round_times([each.sequence for each in running])
        verify_ms = 0.0 if times is None else times.verify.time_ms(len(running))
        view = LaneView(
            times,
            self.times.ahead.hidden_ms(verify_ms) if self._config.draft_ahead else 0.0,
            self._max_groups(),
        )
        return self._policy.plan(candidates, view)

    def _max_groups(self) -> int:
        """How many cohorts may take turns: drafting beside a verification hides nothing where both compete.

        Whether they do shows when a drafter drafts ahead, which it does for a single cohort; where it never does, that
        is not waited for.
        """
        self._plans += 1
        judge = self.times.ahead
        is_awaited = self._config.draft_ahead and not judge.knows_slowdown and self._plans <= LONGEST_LEARNING
        return 1 if judge.devices_are_shared or is_awaited else self._config.max_cohorts

    def round_times(self, sequences: Iterable[Sequence]) -> RoundTimes | None:
        """Return the times that rounds are planned with, those of the slowest drafter in use; None if not yet known."""
        sequences = list(sequences)
        verify = self.times.verify.fit_or_flat(self._most_tokens(len(sequences)))
        drafts = [fit for worker_id in _drafters(sequences) if (fit := self._roster.step_fit(worker_id)) is not None]
        if verify is None or not drafts:
            return None
        slowest = max(drafts, key=lambda fit: fit.time_ms(1))
        overhead_ms, draft_overhead_ms = self.times.overhead_ms(), self.times.draft_overhead_ms()
        return RoundTimes(verify, slowest, overhead_ms, draft_overhead_ms=draft_overhead_ms)

    def plain_step_ms(self, sequences: int) -> float | None:
        """Return the time in which `sequences` sequences would get a token each without drafts; None if not known."""
        verify = self.times.verify.fit(self._most_tokens(sequences))
        return None if verify is None else verify.time_ms(sequences) + self.times.overhead_ms()

    def cohorts(self, plan: DraftPlan, sequence_ids: Iterable[int]) -> Mapping[int, int]:
        """Return the cohort of each sequence; those alike in draft length are together."""
        lengths = {sequence_id: plan.draft_tokens.get(sequence_id, 0) for sequence_id in sequence_ids}
        current = {sequence_id: cohort for sequence_id, cohort in self._cohorts.items() if sequence_id in lengths}
        if self._config.grouping == "random":
            self._cohorts = random_cohorts(lengths, plan.groups, seed=0)
        else:
            self._cohorts = form_cohorts(lengths, plan.groups, current)
        return self._cohorts

    def draft_tokens(self, plan: DraftPlan, members: Iterable[RunningSequence]) -> dict[int, int]:
        """Return the draft lengths of a round's sequences; a benched drafter is tried now and then."""
        lengths = {}
        for running in members:
            sequence = running.sequence
            lengths[sequence.sequence_id] = plan.draft_tokens.get(sequence.sequence_id, 0)
            if self.lacks_drafter(running) and self._roster.may_probe(sequence.drafter.worker_id):
                lengths[sequence.sequence_id] = 1
        return lengths

    def lacks_drafter(self, running: RunningSequence) -> bool:
        """Whether the sequence should be drafted for and has nobody to do it."""
        sequence = running.sequence
        wants = running.wants_drafts and min(self._limit(sequence), sequence.remaining_tokens - 1) > 0
        return wants and not self._roster.is_usable(sequence.drafter.worker_id)

    def lookup_tokens(self, running: RunningSequence, sequences: int) -> int:
        """Return how many drafts the target may look up for a sequence that gets none, one of `sequences`."""
        if self._config.fallback != "prompt_lookup" or not running.wants_drafts or running.is_check:
            return 0
        sequence = running.sequence
        verify = self.times.verify.fit_or_flat(sequences * (1 + MOST_LOOKUPS))
        most = max(0, min(self._limit(sequence), sequence.remaining_tokens - 1))
        if verify is None:
            return most
        paying = lookups_that_pay(sequence.lookup_acceptance.rate, verify, sequences)
        if paying == 0 and sequence.verifications % LOOKUP_PROBE_ROUNDS == 0:
            return min(most, 1)
        return min(most, paying)

    def ahead_budget(
        self, rates: SequenceOf[float], draft_tokens: int, step_tokens: int, drafter: str
    ) -> AheadBudget | None:
        """Return how much to draft ahead during a step of `step_tokens` tokens; `rates` are the sequences' own."""
        verify, draft = self.times.verify.fit_or_flat(step_tokens), self._roster.step_fit(drafter)
        if not self._config.draft_ahead or verify is None or draft is None or not rates:
            return None
        verify_ms = verify.time_ms(step_tokens)
        budget = ahead_budget(len(rates), draft_tokens, mean(rates), verify_ms, draft)
        return budget if budget is not None and self.times.ahead.wants(verify_ms) else None

    def expected_draft_ms(self, drafter: str | None, steps: int, rows: int) -> float | None:
        """Return how long drafting takes; None if that is not known."""
        fit = self._roster.step_fit(drafter)
        return None if fit is None or not steps else steps * fit.time_ms(rows)

    def _candidate(self, sequence: Sequence) -> DraftCandidate | None:
        if not self._roster.is_usable(sequence.drafter.worker_id):
            return None
        outcome = sequence.outcome
        return DraftCandidate(
            sequence.sequence_id,
            min(self._limit(sequence), max(0, sequence.remaining_tokens - 1)),
            sequence.acceptance.rate,
            outcome.drafted if outcome else 0,
            outcome.accepted if outcome else 0,
            sequence.verifications,
        )

    def _most_tokens(self, sequences: int) -> int:
        """The largest verification that is planned for `sequences` sequences. Steps with prompts are larger."""
        return sequences * (self._config.max_draft_tokens + 1)

    def _limit(self, sequence: Sequence) -> int:
        requested, most = sequence.request.speculation.max_draft_tokens, self._config.max_draft_tokens
        return most if requested is None else min(requested, most)


def lookups_that_pay(rate: float, verify: StepTimeFit, sequences: int) -> int:
    """Return how many looked-up drafts are worth their time, with an acceptance rate in (0, 1).

    The j-th is accepted with probability rate^j and costs `token_ms`. A token is worth the time that the target needs
    for one without drafts: a step's time, divided by its `sequences`.
    """
    worth_ms = verify.time_ms(sequences) / sequences
    if rate * worth_ms < verify.token_ms:
        return 0
    if verify.token_ms == 0:
        return MOST_LOOKUPS
    return min(MOST_LOOKUPS, int(math.log(verify.token_ms / worth_ms) / math.log(rate)))


def _drafters(sequences: Iterable[Sequence]) -> set[str]:
    return {sequence.drafter.worker_id for sequence in sequences if sequence.drafter.worker_id is not None}
