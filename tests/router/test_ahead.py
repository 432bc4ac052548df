"""How much is drafted ahead: what fits into the verification, drafts before branches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.router.ahead import (
    LEAST_STEPS,
    MOST_BRANCHES,
    REST_EVERY,
    TOLERANCE,
    TRY_EVERY,
    AheadBudget,
    AheadJudge,
    ahead_budget,
)
from workers.router.draft_planning import LaneTimes
from workers.router.step_times import StepTimeFit


def test_a_fast_drafter_drafts_all_there_is_behind_the_most_outcomes() -> None:
    assert ahead_budget(1, 6, 0.1, 30.0, StepTimeFit(1.0, 0.0)) == AheadBudget(MOST_BRANCHES, 6, steps=7)


def test_rows_that_cost_time_are_given_up_before_steps() -> None:
    assert ahead_budget(1, 6, 0.1, 28.0, StepTimeFit(3.0, 0.5)) == AheadBudget(4, 6, steps=6)


@pytest.mark.parametrize(("verify_ms", "most_steps"), [(31.6, 7), (30.6, 6), (27.1 / TOLERANCE, 6), (23.3, 5)])
def test_a_step_of_all_branches_may_take_a_little_longer_than_the_verification(
    verify_ms: float, most_steps: int
) -> None:
    # Seven steps take 31.5 ms, six 27, five 22.5.
    assert ahead_budget(1, 6, 0.6, verify_ms, StepTimeFit(4.5, 0.0)) == AheadBudget(MOST_BRANCHES, 6, most_steps)


@pytest.mark.parametrize(("rate", "steps"), [(0.3, 7), (0.8, 7), (0.95, 8)])
def test_the_last_draft_behind_all_drafts_is_waited_for_where_acceptance_is_high(rate: float, steps: int) -> None:
    # Eight steps take 1.4 ms longer than the verification.
    assert ahead_budget(1, 7, rate, 30.8, StepTimeFit(4.025, 0.0)) == AheadBudget(MOST_BRANCHES, 7, steps)


def test_a_slow_drafter_drafts_less_and_one_as_slow_as_the_target_nothing() -> None:
    assert ahead_budget(1, 6, 0.6, 30.0, StepTimeFit(10.0, 0.0)) == AheadBudget(MOST_BRANCHES, 6, steps=3)
    assert ahead_budget(1, 6, 0.6, 30.0, StepTimeFit(20.0, 0.0)) is None
    assert ahead_budget(1, 0, 0.6, 30.0, StepTimeFit(1.0, 0.0)) is None


@given(
    sequences=st.integers(1, 64),
    draft_tokens=st.integers(0, 8),
    rate=st.floats(0, 1),
    verify_ms=st.floats(0.1, 200),
    base_ms=st.floats(0.01, 50),
    row_ms=st.floats(0, 5),
)
def test_what_is_drafted_ahead_fits_and_vanishes_with_load(
    sequences: int, draft_tokens: int, rate: float, verify_ms: float, base_ms: float, row_ms: float
) -> None:
    draft = StepTimeFit(base_ms, row_ms)
    budget = ahead_budget(sequences, draft_tokens, rate, verify_ms, draft)
    if budget is None:
        assert draft_tokens == 0 or 2 * draft.time_ms(sequences) > verify_ms * TOLERANCE
        return
    assert budget.draft_tokens == draft_tokens
    assert 2 <= budget.steps <= draft_tokens + 1
    assert 1 <= budget.branches <= MOST_BRANCHES
    assert budget.steps * draft.time_ms(sequences * budget.branches) <= verify_ms * TOLERANCE
    more = ahead_budget(sequences * 2, draft_tokens, rate, verify_ms, draft)
    # With fewer branches a step is shorter, and the one behind all drafts may pay.
    assert more is None or min(more.steps, draft_tokens) <= budget.steps


def judged(slowdown: float, saved_ms: float) -> AheadJudge:
    judge = AheadJudge()
    for _ in range(LEAST_STEPS):
        judge.slowdown.observe(slowdown)
        judge.saved_ms.observe(saved_ms)
    return judge


def test_drafting_ahead_is_worth_a_slower_verification_only_where_it_saves_more() -> None:
    assert AheadJudge().pays(30.0)
    assert judged(1.0, 1.6).pays(30.0)
    assert judged(1.2, 8.0).pays(30.0)
    assert not judged(1.3, 8.0).pays(30.0)
    assert not judged(1.0, -2.0).pays(30.0)


def test_what_it_hides_is_what_it_saves_less_what_the_slower_verification_costs() -> None:
    assert judged(1.0, 8.0).hidden_ms(30.0) == 8.0
    assert judged(0.9, 8.0).hidden_ms(30.0) == 8.0
    assert judged(1.2, 8.0).hidden_ms(30.0) == pytest.approx(2.0)
    assert judged(1.5, 8.0).hidden_ms(30.0) == 0.0
    assert AheadJudge().hidden_ms(30.0) == 0.0
    stopped = judged(1.5, 8.0)
    stopped.wants(30.0)
    assert stopped.hidden_ms(1.0) == 0.0


def test_where_it_pays_it_rests_now_and_then_and_where_not_it_is_tried_now_and_then() -> None:
    good, bad = judged(1.0, 11.0), judged(2.0, 11.0)
    assert sum(not good.wants(30.0) for _ in range(1200)) == 1200 // REST_EVERY
    assert sum(bad.wants(30.0) for _ in range(1280)) == 1280 // TRY_EVERY


def test_a_target_that_slows_down_while_its_drafter_works_shares_a_device_with_it() -> None:
    assert not AheadJudge().devices_are_shared
    assert not judged(1.05, 11.0).devices_are_shared
    assert judged(1.4, 11.0).devices_are_shared


def test_a_few_slow_verifications_are_enough_to_stop() -> None:
    judge = judged(1.0, 340.0)
    for _ in range(30):
        judge.slowdown.observe(1.0)
    assert judge.wants(480.0) and judge.is_on
    for _ in range(4):
        judge.slowdown.observe(2.2)
    judge.wants(480.0)
    assert not judge.is_on


def test_only_verifications_without_prompts_tell_whether_drafting_ahead_slows_down() -> None:
    times = LaneTimes()
    for tokens in (4, 8, 16):
        times.observe_step(tokens, 100.0, beside_drafting=False, reads_prompts=False)
    for _ in range(LEAST_STEPS):
        times.observe_step(60, 900.0, beside_drafting=True, reads_prompts=True)
    assert not times.ahead.devices_are_shared
    for _ in range(LEAST_STEPS):
        times.observe_step(8, 200.0, beside_drafting=True, reads_prompts=False)
    assert times.ahead.slowdown.value == pytest.approx(2.0)
    assert times.ahead.devices_are_shared
