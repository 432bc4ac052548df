"""The circuit breaker: what opens it, what it lets through afterwards, what closes it; and where break-even lies."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.breaker import LEAST_VERIFICATIONS, BreakerState, CircuitBreaker, breakeven_rate
from workers.router.goodput import RoundTimes, evaluate_lengths
from workers.router.step_times import StepTimeFit

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
DRAFTED = 4


def serve(breaker: CircuitBreaker, rate: float, verifications: int, seed: int = 0, breakeven: float = 0.2) -> int:
    """Report verifications at time 0 until the breaker opens; how many there were."""
    numbers = random.Random(seed)
    for number in range(verifications):
        accepted = 0
        while accepted < DRAFTED and numbers.random() < rate:
            accepted += 1
        breaker.observe(DRAFTED, accepted, breakeven, 0.0)
        if breaker.state is OPEN:
            return number + 1
    return verifications


def opened(now_s: float = 0.0, first_pause_s: float = 10.0, longest_pause_s: float = 80.0) -> CircuitBreaker:
    breaker = CircuitBreaker(first_pause_s, longest_pause_s, probes=3)
    for _ in range(LEAST_VERIFICATIONS):
        breaker.observe(DRAFTED, 0, 0.5, now_s)
    assert breaker.state is OPEN
    return breaker


def probe(breaker: CircuitBreaker, now_s: float, accepted: int) -> int:
    """Ask for as many proposals as are let through and report on each; how many there were."""
    granted = 0
    while breaker.allows(now_s) and granted < 100:
        granted += 1
        breaker.observe(DRAFTED, accepted, 0.3, now_s)
        if breaker.state is not HALF_OPEN:
            break
    return granted


# --- opening -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("breakeven", [0.001, 0.05, 0.13, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_with_broken_weights_is_left_out_within_fifty_verifications(breakeven: float, seed: int) -> None:
    breaker = CircuitBreaker()
    assert 24 <= serve(breaker, 0.002, 50, seed, breakeven) <= 50
    assert breaker.state is OPEN and not breaker.allows(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_drafter_that_pays_is_never_left_out(seed: int) -> None:
    breaker = CircuitBreaker()
    serve(breaker, 0.4, 5000, seed, breakeven=0.2)
    assert breaker.state is CLOSED and breaker.allows(0.0)


def test_a_drafter_that_does_not_quite_pay_is_left_out_in_the_end() -> None:
    assert serve(CircuitBreaker(), 0.2, 5000, breakeven=0.35) < 1000


def test_a_drafter_that_becomes_useless_is_left_out_soon() -> None:
    breaker = CircuitBreaker()
    assert serve(breaker, 0.8, 2000) == 2000
    assert serve(breaker, 0.0, 600) < 400


def test_long_chains_of_a_drafter_that_pays_do_not_count_against_it() -> None:
    breaker = CircuitBreaker()
    for number in range(1000):
        # One of eight drafts is accepted each other time: a third of those that were judged.
        breaker.observe(8, number % 2, 0.2, 0.0)
    assert breaker.state is CLOSED


def test_rounds_without_drafts_are_no_evidence() -> None:
    breaker = CircuitBreaker()
    for _ in range(1000):
        breaker.observe(0, 0, 0.5, 0.0)
    assert breaker.state is CLOSED


# --- trying again --------------------------------------------------------------------------------------------


def test_after_the_pause_a_few_probes_are_let_through() -> None:
    breaker = opened()
    assert [breaker.allows(10.0) for _ in range(5)] == [True, True, True, False, False]
    assert breaker.state is HALF_OPEN


def test_it_closes_when_the_probes_pay() -> None:
    breaker = opened()
    assert probe(breaker, 10.0, accepted=4) == 3
    assert breaker.state is CLOSED
    assert all(breaker.allows(10.0) for _ in range(100))


def test_it_opens_for_twice_as_long_when_they_do_not_up_to_a_longest_pause() -> None:
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(6):
        before_s = now_s
        while not breaker.allows(now_s):
            now_s += 1.0
        pauses.append(now_s - before_s)
        for _ in range(3):
            breaker.observe(DRAFTED, 0, 0.3, now_s)
        assert breaker.state is OPEN
    assert pauses == [10.0, 20.0, 40.0, 80.0, 80.0, 80.0]


def test_probes_of_which_nothing_is_heard_are_granted_again() -> None:
    breaker = opened()
    assert [breaker.allows(10.0) for _ in range(4)] == [True, True, True, False]
    assert not breaker.allows(19.0)
    assert breaker.allows(20.0)


def test_what_was_drafted_before_it_opened_does_not_count_as_a_probe() -> None:
    breaker = opened()
    for _ in range(100):
        breaker.observe(DRAFTED, 4, 0.3, 5.0)
    assert breaker.state is OPEN and not breaker.allows(5.0)


@pytest.mark.parametrize(("used_s", "pause_s"), [(1.0, 20.0), (1000.0, 10.0)])
def test_a_drafter_that_fails_again_soon_waits_longer_and_one_that_served_long_does_not(
    used_s: float, pause_s: float
) -> None:
    breaker = opened()
    probe(breaker, 10.0, accepted=4)
    while breaker.state is CLOSED:
        breaker.observe(DRAFTED, 0, 0.5, 10.0 + used_s)
    assert not breaker.allows(10.0 + used_s + pause_s - 0.1)
    assert breaker.allows(10.0 + used_s + pause_s)


@pytest.mark.parametrize("wrong", [{"first_pause_s": 0.0}, {"longest_pause_s": 1.0}, {"probes": 0}])
def test_impossible_settings_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CircuitBreaker(**wrong)


# --- break-even ----------------------------------------------------------------------------------------------


def times_of() -> st.SearchStrategy[RoundTimes]:
    def fit(base: float, slope: float) -> st.SearchStrategy[StepTimeFit]:
        return st.builds(StepTimeFit, st.floats(0.1, base), st.floats(0, slope))

    return st.builds(RoundTimes, fit(50, 1), fit(10, 0.5), st.floats(0, 10), st.integers(0, 200))


@given(times=times_of(), sequences=st.integers(1, 64), hidden_ms=st.sampled_from([0.0, 5.0]), length=st.integers(1, 8))
@settings(max_examples=300)
def test_under_break_even_no_length_beats_plain_decoding_and_over_it_one_draft_does(
    times: RoundTimes, sequences: int, hidden_ms: float, length: int
) -> None:
    def goodput(rate: float, tokens: int) -> float:
        lengths = np.full(sequences, tokens)
        return evaluate_lengths(np.full(sequences, rate), lengths, times, hidden_ms=hidden_ms).goodput

    rate = breakeven_rate(times, sequences, hidden_ms)
    assert 0 <= rate <= 1
    if hidden_ms == 0.0:
        assert goodput(max(rate - 0.01, 0.0), length) <= goodput(0.0, 0) * (1 + 1e-9)
    if rate < 0.98:
        assert goodput(rate + 0.01, 1) >= goodput(0.0, 0)


def test_break_even_of_a_known_case() -> None:
    times = RoundTimes(StepTimeFit(30.0, 0.1), StepTimeFit(4.0, 0.05), overhead_ms=1.0)
    assert breakeven_rate(times, 10) == pytest.approx((1.0 + 4.5) / 32.0)
    assert breakeven_rate(times, 10, hidden_ms=100.0) == pytest.approx(1.0 / 32.0)
    assert breakeven_rate(RoundTimes(StepTimeFit(0.0, 0.0), StepTimeFit(1.0, 0.0), 0.0), 1) == 1.0
