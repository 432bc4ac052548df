"""Draft lengths by goodput: against trying all of them, and what they do as load and acceptance change."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.goodput import (
    LengthPlan,
    RoundTimes,
    best_plan,
    evaluate_lengths,
    group_starts,
    plan_lengths,
    worth_waiting,
)
from workers.router.step_times import StepTimeFit

TIMES = RoundTimes(StepTimeFit(30.0, 0.1), StepTimeFit(4.0, 0.02), overhead_ms=2.0)


def drafting_ms(lengths: list[int], times: RoundTimes) -> float:
    """What it takes to ask for drafts of these lengths, one step at a time."""
    steps = sum(times.draft.time_ms(sum(k > step for k in lengths)) for step in range(max(lengths)))
    return steps + times.draft_overhead_ms if max(lengths) else 0.0


def goodput_of(
    rates: list[float], lengths: tuple[int, ...], times: RoundTimes, groups: int = 1, hidden_ms: float = 0.0
) -> float:
    """The definition, one step at a time."""
    tokens = sum(sum(rate**depth for depth in range(length + 1)) for rate, length in zip(rates, lengths, strict=True))
    ordered = sorted(lengths)
    cuts = [part.tolist() for part in np.array_split(np.array(ordered), groups)]

    def verification(group: list[int]) -> float:
        return times.verify.base_ms + times.verify.token_ms * (len(group) + sum(group))

    extra = times.extra_tokens * times.verify.token_ms
    if groups == 1:
        cycle = verification(ordered) + max(0.0, drafting_ms(ordered, times) - hidden_ms) + times.overhead_ms + extra
    else:
        alone = max(verification(group) + drafting_ms(group, times) for group in cuts) + times.overhead_ms
        cycle = max(sum(verification(group) for group in cuts), alone) + extra
    return tokens / cycle


def best_of_all(
    rates: list[float], limits: list[int], times: RoundTimes, groups: int = 1, hidden_ms: float = 0.0
) -> float:
    every = itertools.product(*(range(limit + 1) for limit in limits))
    return max(goodput_of(rates, lengths, times, groups, hidden_ms) for lengths in every)


def times_of() -> st.SearchStrategy[RoundTimes]:
    def fit(base: float, slope: float) -> st.SearchStrategy[StepTimeFit]:
        return st.builds(StepTimeFit, st.floats(0.1, base), st.floats(0, slope))

    return st.builds(RoundTimes, fit(50, 5), fit(10, 2), st.floats(0, 10), st.integers(0, 200), st.floats(0, 10))


def sequences_of(most: int) -> st.SearchStrategy[list[tuple[float, int]]]:
    return st.lists(st.tuples(st.floats(0.001, 0.999), st.integers(0, 4)), min_size=1, max_size=most)


def split(sequences: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [rate for rate, _ in sequences], [limit for _, limit in sequences]


def check(plan: LengthPlan, rates: list[float], limits: list[int], times: RoundTimes, hidden_ms: float = 0.0) -> None:
    """A plan keeps to the limits and promises what the definition says."""
    lengths = tuple(plan.draft_tokens.tolist())
    assert all(0 <= length <= limit for length, limit in zip(lengths, limits, strict=True))
    assert plan.goodput == pytest.approx(goodput_of(rates, lengths, times, plan.groups, hidden_ms), rel=1e-6)
    tokens = plan.goodput * plan.round_ms
    assert tokens == pytest.approx(sum(sum(r**j for j in range(k + 1)) for r, k in zip(rates, lengths, strict=True)))


@given(sequences=sequences_of(5), times=times_of(), hidden_ms=st.sampled_from([0.0, 3.0, 25.0]))
@settings(max_examples=60)
def test_one_group_gets_the_best_lengths_there_are(
    sequences: list[tuple[float, int]], times: RoundTimes, hidden_ms: float
) -> None:
    rates, limits = split(sequences)
    plan = plan_lengths(np.array(rates), np.array(limits), times, 1, hidden_ms)
    check(plan, rates, limits, times, hidden_ms)
    assert plan.goodput >= 0.995 * best_of_all(rates, limits, times, 1, hidden_ms)


@given(sequences=sequences_of(5), times=times_of(), groups=st.integers(2, 3))
@settings(max_examples=60)
def test_groups_in_turns_get_lengths_close_to_the_best(
    sequences: list[tuple[float, int]], times: RoundTimes, groups: int
) -> None:
    rates, limits = split(sequences)
    plan = plan_lengths(np.array(rates), np.array(limits), times, groups)
    assert plan.groups == min(groups, len(rates))
    check(plan, rates, limits, times)
    assert plan.goodput >= 0.97 * best_of_all(rates, limits, times, plan.groups)


@given(sequences=sequences_of(12), times=times_of(), groups=st.integers(1, 4), data=st.data())
@settings(max_examples=60)
def test_the_promise_of_given_lengths_is_the_definition(
    sequences: list[tuple[float, int]], times: RoundTimes, groups: int, data: st.DataObject
) -> None:
    rates, _ = split(sequences)
    lengths = data.draw(st.lists(st.integers(0, 8), min_size=len(rates), max_size=len(rates)))
    plan = evaluate_lengths(np.array(rates), np.array(lengths), times, groups)
    check(plan, rates, [8] * len(rates), times)


def uniform(sequences: int, rate: float, times: RoundTimes = TIMES, limit: int = 8) -> LengthPlan:
    return plan_lengths(np.full(sequences, rate), np.full(sequences, limit), times)


def test_drafts_get_longer_with_acceptance_and_shorter_with_load() -> None:
    by_rate = [int(uniform(4, rate).draft_tokens.max()) for rate in (0.05, 0.4, 0.7, 0.95)]
    assert by_rate == sorted(by_rate) and by_rate[0] == 0 and by_rate[-1] >= 6
    heavy = RoundTimes(StepTimeFit(30.0, 0.4), StepTimeFit(4.0, 0.02), 2.0)
    by_load = [int(uniform(sequences, 0.7, heavy).draft_tokens.sum()) / sequences for sequences in (1, 16, 64, 512)]
    assert by_load == sorted(by_load, reverse=True) and by_load[-1] == 0


def test_where_the_target_is_at_its_limit_nothing_is_drafted() -> None:
    full = RoundTimes(StepTimeFit(0.5, 1.0), StepTimeFit(1.0, 0.1), 0.0)
    assert uniform(64, 0.8, full).draft_tokens.tolist() == [0] * 64


def test_sequences_that_accept_more_get_more_drafts() -> None:
    lengths = plan_lengths(np.array([0.2, 0.5, 0.8, 0.95]), np.full(4, 8), TIMES).draft_tokens.tolist()
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_hidden_draft_time_allows_longer_drafts() -> None:
    rates, limits = np.full(1, 0.6), np.full(1, 8)
    plain, ahead = (plan_lengths(rates, limits, TIMES, 1, hidden) for hidden in (0.0, 40.0))
    assert ahead.draft_tokens[0] > plain.draft_tokens[0]
    assert ahead.goodput > plain.goodput


def test_no_sequences_and_no_room_for_drafts_are_plans_too() -> None:
    assert plan_lengths(np.zeros(0), np.zeros(0, np.int64), TIMES, 2).goodput == 0.0
    assert best_plan(np.full(3, 0.9), np.zeros(3, np.int64), TIMES, 2).draft_tokens.tolist() == [0, 0, 0]


def test_two_groups_are_used_where_they_hide_the_drafting_and_not_where_the_base_of_a_step_counts_twice() -> None:
    slow_drafts = RoundTimes(StepTimeFit(10.0, 0.1), StepTimeFit(8.0, 0.02), 4.0)
    rates, limits = np.full(32, 0.8), np.full(32, 6)
    assert best_plan(rates, limits, slow_drafts, 2).groups == 2
    assert best_plan(rates, limits, slow_drafts, 1).groups == 1
    assert best_plan(rates, limits, RoundTimes(StepTimeFit(30.0, 0.02), StepTimeFit(1.0, 0.0), 1.0), 3).groups == 1


def test_another_group_must_win_by_the_margin() -> None:
    times = RoundTimes(StepTimeFit(10.0, 0.1), StepTimeFit(8.0, 0.02), 4.0)
    rates, limits = np.full(32, 0.8), np.full(32, 6)
    one, two = (plan_lengths(rates, limits, times, groups).goodput for groups in (1, 2))
    assert two > one
    assert best_plan(rates, limits, times, 2, margin=two / one - 1 + 0.01).groups == 1
    assert best_plan(rates, limits, times, 2, margin=two / one - 1 - 0.01).groups == 2


@pytest.mark.parametrize(("sequences", "groups"), [(1, 1), (7, 3), (8, 3), (9, 3), (64, 5)])
def test_groups_are_cut_as_evenly_as_possible(sequences: int, groups: int) -> None:
    cut = [len(part) for part in np.array_split(np.arange(sequences), groups)]
    assert group_starts(sequences, groups).tolist() == [sum(cut[:number]) for number in range(groups)]


def test_a_cohort_waits_for_many_late_drafts_and_not_for_one() -> None:
    rates, lengths = np.full(8, 0.8), np.full(8, 4)
    few, most = np.arange(8) < 1, np.arange(8) < 7
    assert worth_waiting(rates, lengths, few, TIMES)
    assert not worth_waiting(rates, lengths, most, TIMES)
    assert worth_waiting(rates, lengths, most, TIMES, hidden_ms=16.0)
    assert not worth_waiting(rates, lengths, np.full(8, True), TIMES)
    assert not worth_waiting(np.full(8, 0.05), lengths, few, TIMES)


@given(sequences=sequences_of(6), times=times_of(), data=st.data())
@settings(max_examples=60)
def test_waiting_is_decided_by_goodput(
    sequences: list[tuple[float, int]], times: RoundTimes, data: st.DataObject
) -> None:
    rates, lengths = split(sequences)
    ready = data.draw(st.lists(st.booleans(), min_size=len(rates), max_size=len(rates)))
    late = [0 if is_ready else length for is_ready, length in zip(ready, lengths, strict=True)]
    early = [length if is_ready else 0 for is_ready, length in zip(ready, lengths, strict=True)]
    drafting = drafting_ms(late, times)
    at_once = goodput_of(rates, tuple(early), times, hidden_ms=1e9)
    with_all = goodput_of(rates, tuple(lengths), times, hidden_ms=1e9)
    tokens = sum(sum(r**j for j in range(k + 1)) for r, k in zip(rates, lengths, strict=True))
    waiting = tokens / (tokens / with_all + drafting)
    if abs(waiting - at_once) > 1e-9:
        assert worth_waiting(np.array(rates), np.array(lengths), np.array(ready), times) == (waiting > at_once)
