"""Calibration: evidence in, how often it was right out."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.calibration import Calibration

CALIBRATIONS = [Calibration.of_margins, Calibration.of_probabilities]


def right_if(margin: float) -> float:
    """A drafter that is less sure of itself than it could be."""
    return 1 / (1 + math.exp(1.0 - 0.9 * margin))


def test_estimates_come_to_what_a_stream_of_outcomes_shows() -> None:
    generator = np.random.default_rng(1)
    calibration = Calibration.of_margins()
    margins = generator.exponential(3.0, 12_000)
    for margin in margins:
        calibration.learn(float(margin), bool(generator.random() < right_if(margin)))
    errors = [abs(calibration.probability(margin) - right_if(margin)) for margin in np.linspace(0.2, 9, 40)]
    assert max(errors) < 0.1 and np.mean(errors) < 0.035


def test_a_drafter_that_changes_is_learnt_anew() -> None:
    calibration = Calibration.of_margins()
    for accepted in [True] * 3000 + [False] * 1500:
        calibration.learn(2.0, accepted)
    assert calibration.probability(2.0) < 0.1


@pytest.mark.parametrize("make", CALIBRATIONS)
def test_without_evidence_surer_drafts_are_likelier_and_nothing_is_certain(make: object) -> None:
    estimates = [make().probability(each) for each in np.linspace(0, 1, 30)]  # type: ignore[operator]
    assert estimates == sorted(estimates) and 0.2 < estimates[0] < estimates[-1] < 0.97


@given(st.lists(st.tuples(st.floats(0, allow_infinity=True), st.booleans()), max_size=80), st.floats(0))
@settings(max_examples=200)
def test_whatever_comes_estimates_are_bounded_and_rise(stream: list[tuple[float, bool]], evidence: float) -> None:
    calibration = Calibration.of_margins()
    for each, accepted in stream:
        calibration.learn(each, accepted)
    estimates = [calibration.probability(each) for each in (0.0, 0.3, 1.0, 2.5, 7.0, 30.0, math.inf)]
    assert all(0 < estimate < 1 for estimate in [*estimates, calibration.probability(evidence)])
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(estimates))
