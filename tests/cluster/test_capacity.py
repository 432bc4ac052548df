"""Expected speed follows the formulas, and choices follow the times."""

import pytest

from cluster.accelerators import CATALOGUE
from cluster.capacity import (
    BANDWIDTH_SHARE,
    PairTimes,
    StepTime,
    ahead_speed_up,
    break_even,
    capacity_row,
    drafters_for,
    expected_tokens,
    roofline_step,
    speed_up,
)
from cluster.known_models import known_shape


def test_the_formulas_in_closed_form() -> None:
    a, k, c = 0.7, 5, 0.2
    expected = (1 - a ** (k + 1)) / (1 - a)
    assert expected_tokens(a, k) == pytest.approx(expected)
    assert speed_up(a, k, 30 * c, 30, 30) == pytest.approx(expected / (k * c + 1))
    assert speed_up(1.0, 4, 0.0, 30, 30) == 5
    for hit in (0.0, 0.5, 1.0):
        bound = expected / (hit * max(1, k * c) + (1 - hit) * (1 + k * c))
        assert ahead_speed_up(a, k, 30 * c, 30, 30, hit) == pytest.approx(bound)


def test_the_best_draft_length_is_chosen_for_each_way() -> None:
    times = PairTimes(StepTime(30.0), StepTime(4.0))
    row = capacity_row(times, 0.8, 1, 8, hit=1.0)
    by_hand = {k: (1 - 0.8 ** (k + 1)) / 0.2 for k in range(9)}
    assert row.in_turn.speed_up == pytest.approx(max(e / (1 + k * 4 / 30) for k, e in by_hand.items()))
    # Seven drafts take 28 ms of 30; the eighth would make the target wait.
    assert row.ahead.draft_tokens == 7 and row.ahead.round_ms == pytest.approx(30)
    assert row.ahead.speed_up == pytest.approx(by_hand[7])
    assert row.drafters == pytest.approx(28 / 30)
    assert row.tokens_per_s == pytest.approx(by_hand[7] * 1e3 / 30)


def test_where_drafting_does_not_pay_nothing_is_drafted() -> None:
    slow = PairTimes(StepTime(30.0), StepTime(61.0))
    row = capacity_row(slow, 0.9, 4, 8)
    assert (row.in_turn.draft_tokens, row.ahead.draft_tokens, row.drafters) == (0, 0, 0.0)
    assert row.in_turn.speed_up == row.ahead.speed_up == 1.0
    assert drafters_for([row], 3) == 0
    # A device that computes all the time gains nothing from wider steps.
    busy = PairTimes(StepTime(30.0, compute_ms=1.0), StepTime(4.0))
    assert capacity_row(busy, 0.6, 1, 8).in_turn.draft_tokens > 0
    assert capacity_row(busy, 0.6, 64, 8).in_turn.draft_tokens == 0


def test_break_even_is_where_one_draft_pays_for_its_time() -> None:
    assert break_even(PairTimes(StepTime(30.0), StepTime(6.0)), 1, 1) == pytest.approx(0.2, abs=1e-6)
    # (1 + a) / (1 + c) with a verification that takes a tenth longer
    assert break_even(PairTimes(StepTime(27.0, 3.0), StepTime(6.0)), 1, 1) == pytest.approx(0.3, abs=1e-6)
    assert break_even(PairTimes(StepTime(30.0), StepTime(31.0)), 1, 1) is None


def test_slow_drafters_are_asked_for_in_numbers() -> None:
    fast, slow = (capacity_row(PairTimes(StepTime(30.0), StepTime(ms)), 0.9, 8, 1, 1.0) for ms in (3.0, 45.0))
    assert drafters_for([fast], 1) == 1 and drafters_for([fast], 10) == 1
    assert slow.drafters == pytest.approx(1.0) and drafters_for([fast, slow], 3) == 3


def test_the_roofline_reads_weights_and_kv_once() -> None:
    shape, device = known_shape("Llama-3.1-70B"), CATALOGUE["A100-80GB"]
    assert shape is not None
    step = roofline_step(shape, device, "bfloat16", "none", 4, 1000)
    weights, cached = 2 * (70_553_706_496 - 128_256 * 8192) / 4, 1000 * 2 * 80 * 2 * 128 * 2
    rate = 2039e9 * BANDWIDTH_SHARE / 1e3
    assert step.ms(1, 1) == pytest.approx((weights + cached) / rate, rel=1e-3)
    assert step.ms(8, 8) - step.ms(1, 1) == pytest.approx(7 * cached / rate)
    wide = step.ms(4000, 1)
    assert wide == pytest.approx(1e3 * 4000 * weights / (312e12 * 0.5), rel=1e-2)
    quantised = roofline_step(shape, device, "bfloat16", "int8", 1, 0)
    assert quantised.ms(1, 1) < 0.52 * roofline_step(shape, device, "bfloat16", "none", 1, 0).ms(1, 1)
