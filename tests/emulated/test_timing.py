"""Emulated devices take the time that their timing says, and count what they could not keep."""

import time
from dataclasses import replace

import pytest

from tests.emulated.conftest import StandingClock
from tests.emulated.workers import PROMPT, SAMPLING, drafter, target
from workers.answering import answer
from workers.emulated.stretched import EmulatedDrafter, EmulatedTarget, stretched_drafter, stretched_target
from workers.emulated.timing import DrafterTiming, EmulatedDevice, TargetTiming, sleep_until
from workers.messages import (
    DraftAheadItem,
    DraftAheadRequest,
    Proposal,
    ProposeItem,
    ProposeRequest,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

STEADY = DrafterTiming(step_ms=40.0, row_ms=2.0, read_token_ms=0.5)


def start(sequence_id: int, draft_tokens: int) -> ProposeItem:
    return ProposeItem(sequence_id, 0, 0, token_ids(PROMPT), draft_tokens, SAMPLING, len(PROMPT))


def go_on(sequence_id: int, drafts: list[int], draft_tokens: int, branches: int) -> DraftAheadItem:
    return DraftAheadItem(sequence_id, 0, 4, token_ids(PROMPT[4:]), token_ids(drafts), draft_tokens, branches)


def test_a_targets_step_takes_its_base_and_the_tokens_it_reads(clock: StandingClock) -> None:
    worker = EmulatedTarget(target(), TargetTiming(base_ms=40.0, token_ms=1.5))
    item = VerifyItem(1, 0, 0, token_ids(PROMPT), Proposal(token_ids([70, 71])), sampling=SAMPLING, prompt_tokens=5)
    response = worker.verify(VerifyRequest((item,)))
    assert clock.now_s * 1e3 == pytest.approx(40.0 + 7 * 1.5)
    assert response.compute_ms == 40.0 + 7 * 1.5
    assert (worker.usage.steps, worker.usage.tokens, worker.usage.busy_ms) == (1, 7, 50.5)
    assert worker.stats().sequences == 1


def test_a_step_that_reads_nothing_takes_no_time() -> None:
    lost = VerifyItem(1, 0, 5, token_ids([70]))
    assert TargetTiming().verify_ms(target().verify(VerifyRequest((lost,)))) == 0


def test_a_drafter_takes_a_pass_per_draft_and_rows_drop_out(clock: StandingClock) -> None:
    request = ProposeRequest((start(1, 3), start(2, 1)))
    response = drafter().propose(request)
    # Passes of 2, 1 and 1 rows; the first one reads 8 tokens more than one per row.
    assert STEADY.propose_ms(request, response) == 3 * 40.0 + 4 * 2.0 + 8 * 0.5
    assert EmulatedDrafter(drafter(), STEADY).propose(request).compute_ms == 132.0
    assert clock.now_s * 1e3 == pytest.approx(132.0)


def test_reading_alone_takes_one_pass_and_being_lost_none() -> None:
    worker = drafter()
    request = ProposeRequest((start(1, 0),))
    assert STEADY.propose_ms(request, worker.propose(request)) == 40.0 + 2.0 + 4 * 0.5
    request = ProposeRequest((ProposeItem(9, 0, 5, token_ids([70]), 4),))
    assert STEADY.propose_ms(request, worker.propose(request)) == 0


def test_a_draft_that_was_too_uncertain_took_its_time_too() -> None:
    item = ProposeItem(1, 0, 0, token_ids(PROMPT), 5, SAMPLING, len(PROMPT), least_confidence=1.0)
    request = ProposeRequest((item,))
    assert STEADY.propose_ms(request, drafter(rates=(0.5,)).propose(request)) == 2 * 42.0 + 4 * 0.5


def test_drafting_ahead_takes_a_pass_to_read_and_one_per_draft_of_all_branches(clock: StandingClock) -> None:
    worker = EmulatedDrafter(drafter(rates=(0.6,)), STEADY)
    chain = worker.propose(ProposeRequest((start(1, 4),))).items[0].proposal.token_ids.tolist()
    response = worker.draft_ahead(DraftAheadRequest((go_on(1, chain, draft_tokens=3, branches=5),)))
    assert len(response.items[0].branches) == 5
    assert response.compute_ms == (40.0 + 2.0) + 3 * (40.0 + 5 * 2.0) + 4 * 0.5
    assert (worker.ahead_usage.steps, worker.ahead_usage.tokens) == (1, 15)
    assert (worker.usage.steps, worker.usage.tokens) == (1, 4)
    assert clock.now_s * 1e3 == pytest.approx(worker.usage.busy_ms + response.compute_ms)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_branches_of_corrections_begin_in_the_pass_that_reads(clock: StandingClock, steps: int) -> None:
    worker = EmulatedDrafter(drafter(rates=(0.6,)), STEADY)
    chain = worker.propose(ProposeRequest((start(1, 4),))).items[0].proposal.token_ids.tolist()
    item = replace(go_on(1, chain, draft_tokens=3, branches=5), steps=steps)
    response = worker.draft_ahead(DraftAheadRequest((item,)))
    drafts = {branch.accepted: len(branch.proposal) for branch in response.items[0].branches}
    assert drafts.pop(4) == steps - 1 and set(drafts.values()) == {min(3, steps)}
    rows = 1 + sum(len(branch.proposal) for branch in response.items[0].branches)
    assert response.compute_ms == steps * 40.0 + rows * 2.0 + 4 * 0.5


def test_a_step_that_was_computed_too_late_is_an_overrun_and_says_how_long_it_took(clock: StandingClock) -> None:
    device = EmulatedDevice()
    took_ms = device.finish(clock.now_s - 1.0, 400.0, 3)
    assert took_ms == pytest.approx(1_000.0)
    assert device.usage.overruns == 1
    assert device.usage.overrun_ms == pytest.approx(600.0)
    assert device.usage.busy_ms == took_ms
    assert device.usage.late_ms == pytest.approx(0.0)
    assert clock.now_s == 0.0
    assert device.finish(clock.now_s, 5.0, 3) == 5.0
    assert (device.usage.steps, device.usage.tokens, device.usage.overruns) == (2, 6, 1)


def test_nobody_wakes_up_too_early() -> None:
    for milliseconds in (0.0, 0.05, 0.8, 1.5, 7.3):
        moment = time.perf_counter() + milliseconds / 1e3
        sleep_until(moment)
        assert time.perf_counter() >= moment


def test_without_a_timing_a_worker_stays_as_it_is() -> None:
    real, guess = target(), drafter()
    assert stretched_target(real, None) is real
    assert stretched_drafter(guess, None) is guess
    assert isinstance(stretched_target(real, TargetTiming()), EmulatedTarget)
    assert stretched_drafter(guess, STEADY).limits == guess.limits


def test_a_drafter_that_cannot_draft_ahead_says_so_when_asked() -> None:
    class Plain:
        """A drafter without draft_ahead."""

    with pytest.raises(TypeError, match="Plain does not answer DraftAheadRequest"):
        answer(Plain(), DraftAheadRequest(()))  # type: ignore[arg-type]
