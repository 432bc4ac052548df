"""Draft lengths that commit the most tokens per millisecond, given acceptance rates and step times.

With acceptance rate a, a chain of k drafts commits E(k) = 1 + a + a² + … + a^k tokens on average (Leviathan et al.
2023, equation 1). A verification reads k + 1 tokens per sequence; the drafter takes as many steps as the longest chain
of its group, and step s has one row for each sequence that drafts more than s tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workers.router.step_times import StepTimeFit

THRESHOLDS = 16
"""How many trade-offs between time and tokens are tried for sequences in several groups."""
SMALLEST_CYCLE_MS = 1e-6

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """What a round is made of: a verification by its tokens, ONE draft step by its rows, and the router and its links.

    `extra_tokens` are prompt tokens that a round reads beside, once for all groups. `draft_overhead_ms` is overhead
    that only a round with drafts has.
    """

    verify: StepTimeFit
    draft: StepTimeFit
    overhead_ms: float
    extra_tokens: int = 0
    draft_overhead_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """Draft lengths, shape [n] int64, in the order of the sequences; what they promise, and in how many groups.

    `goodput` is in tokens per millisecond, `round_ms` the time in which every sequence is verified once.
    """

    draft_tokens: Ints
    goodput: float
    round_ms: float
    groups: int = 1


def plan_lengths(rates: Floats, limits: Ints, times: RoundTimes, groups: int = 1, hidden_ms: float = 0.0) -> LengthPlan:
    """Return the draft lengths with the most expected tokens per time; the best there are if `groups` is 1.

    A single group drafts, then verifies; drafting ahead hides `hidden_ms` of the former. Several groups, cut from the
    sequences in order of draft length, take turns on the target: while one is verified the others draft.

    Args:
        rates: Acceptance rates in [0, 1), shape [n].
        limits: The most drafts of each sequence, shape [n].
        times: Times of steps, and the overhead of a round.
        groups: At most one per sequence is used.
        hidden_ms: Draft time that costs nothing; with several groups it has no meaning.
    """
    groups = max(1, min(groups, len(rates)))
    return _Search(rates, limits, times).best(groups, hidden_ms)


def best_plan(
    rates: Floats,
    limits: Ints,
    times: RoundTimes,
    max_groups: int = 1,
    hidden_ms: float = 0.0,
    margin: float = 0.03,
) -> LengthPlan:
    """Return the best of `plan_lengths` for 1 to `max_groups` groups; more than one must gain `margin` over fewer."""
    search = _Search(rates, limits, times)
    best = search.best(1, hidden_ms)
    for groups in range(2, min(max_groups, len(rates)) + 1):
        plan = search.best(groups, hidden_ms)
        if plan.goodput > best.goodput * (1 + margin):
            best = plan
    return best


def evaluate_lengths(
    rates: Floats, lengths: Ints, times: RoundTimes, groups: int = 1, hidden_ms: float = 0.0
) -> LengthPlan:
    """Return what given draft lengths promise. Arguments as for `plan_lengths`."""
    if len(rates) == 0:
        return LengthPlan(np.zeros(0, np.int64), 0.0, 0.0)
    groups = max(1, min(groups, len(rates)))
    lengths = np.asarray(lengths, np.int64)
    cycle = float(_cycle_ms(np.sort(lengths)[None, :], times, groups, hidden_ms)[0])
    return LengthPlan(lengths, float(_expected_tokens(rates, lengths).sum()) / cycle, cycle, groups)


def worth_waiting(
    rates: Floats, lengths: Ints, ready: NDArray[np.bool_], times: RoundTimes, hidden_ms: float = 0.0
) -> bool:
    """Tell whether a cohort should wait for the drafts of its sequences that are not ready, or be verified at once.

    At once, those that are not ready have no drafts in this round. If it waits they have `lengths`, and the whole
    cohort pays for the time of their drafting, less `hidden_ms`. Shapes are [n].
    """
    if bool(ready.all()):
        return False
    late = np.where(ready, 0, lengths)
    draft_ms = max(0.0, float(_draft_ms(late.max(), late.sum(), times)) - hidden_ms)
    with_all = evaluate_lengths(rates, lengths, times, hidden_ms=float("inf"))
    at_once = evaluate_lengths(rates, np.where(ready, lengths, 0), times, hidden_ms=float("inf"))
    return with_all.goodput * with_all.round_ms / (with_all.round_ms + draft_ms) > at_once.goodput


def group_starts(sequences: int, groups: int) -> Ints:
    """Return where each group begins among sequences in order of draft length, shape [groups]; the first are larger."""
    size, larger = divmod(sequences, groups)
    numbers = np.arange(groups)
    return numbers * size + np.minimum(numbers, larger)


def _expected_tokens(rates: Floats, lengths: Ints) -> Floats:
    """E(k) of each sequence, in closed form."""
    rates = np.clip(rates, 0.0, 1 - 1e-9)
    expected: Floats = (1 - rates ** (lengths + 1)) / (1 - rates)
    return expected


def _draft_ms(steps: Floats | Ints, drafts: Floats | Ints, times: RoundTimes) -> Floats:
    """The time of asking for `steps` draft steps that produce `drafts` tokens in all: one row of one step for each."""
    asking_ms = times.draft_overhead_ms * (np.asarray(steps) > 0)
    result: Floats = np.asarray(steps * times.draft.base_ms + drafts * times.draft.token_ms + asking_ms, np.float64)
    return result


def _cycle_ms(ordered: Ints, times: RoundTimes, groups: int, hidden_ms: float) -> Floats:
    """The time of one round of every sequence, shape [m], for m plans of lengths in ascending order, shape [m, n]."""
    sequences = ordered.shape[1]
    starts = group_starts(sequences, groups)
    ends = np.append(starts[1:], sequences)
    drafts = np.add.reduceat(ordered, starts, axis=1)
    draft = _draft_ms(ordered[:, ends - 1], drafts, times)
    verify = times.verify.base_ms + times.verify.token_ms * (drafts + (ends - starts))
    extra = times.verify.token_ms * times.extra_tokens
    if groups == 1:
        cycle = verify[:, 0] + np.maximum(draft[:, 0] - hidden_ms, 0) + times.overhead_ms
    else:
        cycle = np.maximum(verify.sum(axis=1), (verify + draft).max(axis=1) + times.overhead_ms)
    result: Floats = np.maximum(cycle + extra, SMALLEST_CYCLE_MS)
    return result


class _Search:
    """One set of sequences and times, tried with several numbers of groups.

    A draft at depth j of a sequence is worth a^j tokens, which falls with j: for a given number of draft steps and
    of drafts, the best are simply those worth the most. `_gains` holds all that the limits allow, falling, with
    `_depths` and `_owners`; each is of shape [all drafts]. `_table` has a^j by depth and sequence.
    """

    def __init__(self, rates: Floats, limits: Ints, times: RoundTimes) -> None:
        self._rates = np.clip(np.asarray(rates, np.float64), 0.0, 1 - 1e-9)
        self._limits = np.maximum(np.asarray(limits, np.int64), 0)
        self._times = times
        self._steps = np.arange(1, 1 + int(self._limits.max(initial=0)))
        self._table = self._rates[None, :] ** self._steps[:, None]
        depths, owners = np.nonzero(self._limits[None, :] >= self._steps[:, None])
        order = np.argsort(-self._table[depths, owners], kind="stable")
        self._depths, self._owners = depths[order] + 1, owners[order]
        self._gains = self._table[self._depths - 1, self._owners]

    def best(self, groups: int, hidden_ms: float) -> LengthPlan:
        plain = self._plain(groups)
        if len(self._gains) == 0:
            return plain
        plan = self._best_alone(hidden_ms) if groups == 1 else self._best_in_turns(groups)
        return plan if plan.goodput > plain.goodput else plain

    def _plain(self, groups: int) -> LengthPlan:
        """No drafts at all."""
        times, sequences = self._times, len(self._rates)
        largest = times.verify.time_ms(-(-sequences // groups)) + times.overhead_ms
        in_turns = groups * times.verify.base_ms + sequences * times.verify.token_ms
        cycle = max(in_turns, largest) + times.verify.token_ms * times.extra_tokens
        cycle = max(cycle, SMALLEST_CYCLE_MS)
        return LengthPlan(np.zeros(sequences, np.int64), sequences / cycle, cycle, groups)

    def _best_alone(self, hidden_ms: float) -> LengthPlan:
        """Try every number of steps (rows) with every number of drafts (columns): exact for a single group."""
        times, sequences = self._times, len(self._rates)
        allowed = self._depths[None, :] <= self._steps[:, None]
        tokens = sequences + np.cumsum(np.where(allowed, self._gains, 0.0), axis=1)
        drafts: Ints = np.cumsum(allowed, axis=1, dtype=np.int64)
        read = sequences + times.extra_tokens + drafts
        exposed = np.maximum(_draft_ms(self._steps[:, None], drafts, times) - hidden_ms, 0)
        cycle = times.verify.base_ms + times.verify.token_ms * read + exposed + times.overhead_ms
        goodput = tokens / np.maximum(cycle, SMALLEST_CYCLE_MS)
        row, column = np.unravel_index(int(np.argmax(goodput)), goodput.shape)
        chosen = self._owners[: column + 1][allowed[row, : column + 1]]
        lengths = np.bincount(chosen, minlength=sequences)
        return LengthPlan(lengths, float(goodput[row, column]), float(cycle[row, column]))

    def _best_in_turns(self, groups: int) -> LengthPlan:
        """Try every number of steps with drafts worth more than each of a few thresholds."""
        ordered, tokens = self._candidates
        cycle = _cycle_ms(ordered.reshape(-1, ordered.shape[-1]), self._times, groups, 0.0).reshape(tokens.shape)
        goodput = tokens / cycle
        row, column = np.unravel_index(int(np.argmax(goodput)), goodput.shape)
        worth = self._worth_drafting[:, column].sum(axis=0)
        lengths = np.minimum(worth, self._steps[row])
        return LengthPlan(lengths, float(goodput[row, column]), float(cycle[row, column]), groups)

    @cached_property
    def _worth_drafting(self) -> NDArray[np.bool_]:
        """Whether a draft is allowed and worth a threshold's gain, shape [depths, thresholds, n]."""
        picked = np.unique(np.linspace(0, len(self._gains) - 1, THRESHOLDS).astype(np.int64))
        worth: NDArray[np.bool_] = (self._table[:, None, :] >= self._gains[picked][None, :, None]) & (
            self._limits >= self._steps[:, None]
        )[:, None, :]
        return worth

    @cached_property
    def _candidates(self) -> tuple[Ints, Floats]:
        """Lengths in ascending order, shape [steps, thresholds, n], and expected tokens, shape [steps, thresholds]."""
        worth = self._worth_drafting
        ordered = np.minimum(np.sort(worth.sum(axis=0), axis=1)[None, :, :], self._steps[:, None, None])
        tokens = len(self._rates) + np.cumsum(np.einsum("dtn,dn->dt", worth, self._table), axis=0)
        return ordered, tokens
