"""The goodput policy in a simulated lane: against every fixed draft length, as acceptance, load and times vary.

Acceptance is drawn with fixed seeds and is what the policy learns from; what a round is worth is computed: expected
tokens of the chosen lengths under the true rates, over the true time of the round.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from workers.router.acceptance import AcceptanceBook, AcceptanceEstimate
from workers.router.draft_length import DraftCandidate, DraftLengthPolicy, LaneView, draft_length_policy
from workers.router.goodput import RoundTimes, evaluate_lengths
from workers.router.step_times import StepTimeFit

MOST = 8
SEQUENCE_TOKENS = 200
UNKNOWN_ROUNDS = 3
"""Rounds at the beginning in which the policy does not know how long steps take."""


@dataclass(slots=True)
class Running:
    """One slot's sequence, and what its last verification gave."""

    sequence_id: int
    estimate: AcceptanceEstimate
    remaining: int
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0

    def candidate(self, limit: int) -> DraftCandidate:
        return DraftCandidate(
            self.sequence_id, limit, self.estimate.rate, self.drafted, self.accepted, self.verifications
        )


@dataclass(slots=True)
class Lane:
    """Slots that always hold a sequence; the rate of a slot's sequences is given, and may be changed in between."""

    rates: list[float]
    times: RoundTimes
    policy: DraftLengthPolicy
    seed: int = 0
    tokens: float = 0.0
    time_ms: float = 0.0
    lengths: list[list[int]] = field(default_factory=list)
    _book: AcceptanceBook = field(default_factory=AcceptanceBook)
    _running: list[Running] = field(default_factory=list)
    _started: int = 0

    def run(self, rounds: int, known: RoundTimes | None = None, max_groups: int = 1) -> None:
        """Run rounds; the policy is told the times `known`, or else the true ones."""
        numbers = random.Random(self.seed)
        self._running = self._running or [self._start(numbers.randrange(1, SEQUENCE_TOKENS)) for _ in self.rates]
        for _ in range(rounds):
            view = LaneView(None if len(self.lengths) < UNKNOWN_ROUNDS else known or self.times, 0.0, max_groups)
            plan = self.policy.plan([running.candidate(MOST) for running in self._running], view)
            lengths = [plan.draft_tokens[running.sequence_id] for running in self._running]
            assert all(0 <= length <= MOST for length in lengths)
            true = evaluate_lengths(np.array(self.rates), np.array(lengths), self.times, plan.groups)
            self.tokens += true.goodput * true.round_ms
            self.time_ms += true.round_ms
            self.lengths.append(lengths)
            for slot, length in enumerate(lengths):
                self._verify(slot, length, numbers)

    def goodput(self) -> float:
        return self.tokens / self.time_ms

    def _start(self, tokens: int) -> Running:
        self._started += 1
        return Running(self._started, self._book.sequence_estimate("drafter", "all"), tokens)

    def _verify(self, slot: int, length: int, numbers: random.Random) -> None:
        running, accepted = self._running[slot], 0
        while accepted < length and numbers.random() < self.rates[slot]:
            accepted += 1
        running.estimate.observe(length, accepted)
        self._book.observe("drafter", "all", length, accepted)
        running.drafted, running.accepted = length, accepted
        running.verifications += 1
        running.remaining -= accepted + 1
        if running.remaining <= 0:
            self.policy.forget(running.sequence_id)
            self._running[slot] = self._start(SEQUENCE_TOKENS)


def fixed_goodput(rates: Sequence[float], times: RoundTimes, length: int) -> float:
    return evaluate_lengths(np.array(rates), np.full(len(rates), length), times).goodput


def check_against_fixed(lane: Lane) -> None:
    fixed = [fixed_goodput(lane.rates, lane.times, length) for length in range(MOST + 1)]
    assert lane.goodput() >= 0.99 * fixed[0]
    assert lane.goodput() >= 0.97 * max(fixed)


def times_with(token_ms: float) -> RoundTimes:
    return RoundTimes(StepTimeFit(30.0, token_ms), StepTimeFit(4.0, 0.02), overhead_ms=2.0)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("token_ms", [0.02, 0.4])
@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_it_keeps_up_with_the_best_fixed_length_and_with_plain_decoding(
    concurrency: int, token_ms: float, rate: float
) -> None:
    lane = Lane([rate] * concurrency, times_with(token_ms), draft_length_policy("goodput"))
    lane.run(400)
    check_against_fixed(lane)


@pytest.mark.parametrize("token_ms", [0.02, 0.4])
@pytest.mark.parametrize("concurrency", [4, 16, 64])
def test_with_sequences_that_differ_it_is_at_least_as_good(concurrency: int, token_ms: float) -> None:
    rates = [(0.3, 0.6, 0.8, 0.95)[slot % 4] for slot in range(concurrency)]
    lane = Lane(rates, times_with(token_ms), draft_length_policy("goodput"))
    lane.run(500)
    check_against_fixed(lane)


@pytest.mark.parametrize("wrong", [0.8, 1.25])
def test_step_times_that_are_a_quarter_off_do_little_harm(wrong: float) -> None:
    lane = Lane([0.7] * 16, times_with(0.2), draft_length_policy("goodput"))
    off = RoundTimes(StepTimeFit(30.0 * wrong, 0.2), StepTimeFit(4.0, 0.02 * wrong), 2.0)
    lane.run(500, known=off)
    check_against_fixed(lane)


@pytest.mark.parametrize(("concurrency", "used_over"), [(1, 3), (16, 3), (64, 2)])
def test_it_stops_drafting_when_acceptance_falls_and_begins_again_when_it_rises(
    concurrency: int, used_over: int
) -> None:
    lane = Lane([0.9] * concurrency, times_with(0.4), draft_length_policy("goodput"))
    lane.run(300)
    used = np.mean(lane.lengths[-100:])
    lane.rates = [0.02] * concurrency
    lane.run(400)
    unused = np.mean(lane.lengths[-200:])
    lane.rates = [0.9] * concurrency
    lane.run(800)
    assert used > used_over
    assert unused < 0.2 * used
    assert np.mean(lane.lengths[-100:]) > 0.8 * used


def test_lengths_do_not_flap() -> None:
    lane = Lane([0.7] * 4, times_with(0.1), draft_length_policy("goodput"))
    lane.run(600)
    changes = sum(before != after for before, after in zip(lane.lengths[300:], lane.lengths[301:], strict=False))
    # Probes (one round in 32, there and back), small adjustments and sequences that begin.
    assert changes < 100


@pytest.mark.parametrize(("concurrency", "token_ms", "rate"), [(1, 0.4, 0.02), (64, 0.4, 0.3), (64, 0.1, 0.3)])
def test_where_drafts_do_not_pay_they_are_still_tried_and_cost_less_than_a_hundredth(
    concurrency: int, token_ms: float, rate: float
) -> None:
    lane = Lane([rate] * concurrency, times_with(token_ms), draft_length_policy("goodput"))
    lane.run(200)
    tokens, time_ms = lane.tokens, lane.time_ms
    lane.run(400)
    assert sum(sum(lengths) for lengths in lane.lengths[200:]) > 0
    late = (lane.tokens - tokens) / (lane.time_ms - time_ms)
    assert late >= 0.99 * fixed_goodput(lane.rates, lane.times, 0)


def test_a_drafter_that_is_far_too_slow_is_tried_seldom_enough_and_one_that_only_seemed_so_comes_back() -> None:
    slow = RoundTimes(StepTimeFit(30.0, 0.1), StepTimeFit(300.0, 0.0), overhead_ms=2.0)
    lane = Lane([0.9], slow, draft_length_policy("goodput"))
    lane.run(200)
    tokens, time_ms, rounds = lane.tokens, lane.time_ms, len(lane.lengths)
    lane.run(10_000)
    assert sum(sum(lengths) for lengths in lane.lengths[rounds:]) > 0
    assert (lane.tokens - tokens) / (lane.time_ms - time_ms) >= 0.99 * fixed_goodput(lane.rates, slow, 0)
    lane.times = times_with(0.1)
    lane.run(4)
    assert lane.lengths[-1][0] > 3


def test_where_two_groups_are_better_it_uses_them_and_keeps_up_with_the_best_fixed_length_in_two() -> None:
    times = RoundTimes(StepTimeFit(10.0, 0.1), StepTimeFit(8.0, 0.02), overhead_ms=4.0)
    lane = Lane([0.8] * 32, times, draft_length_policy("goodput"))
    lane.run(400, max_groups=3)
    fixed = [
        evaluate_lengths(np.array(lane.rates), np.full(32, length), times, groups).goodput
        for length in range(MOST + 1)
        for groups in (1, 2, 3)
    ]
    assert lane.goodput() >= 0.97 * max(fixed)
    assert max(fixed) > 1.05 * max(fixed_goodput(lane.rates, times, length) for length in range(MOST + 1))
