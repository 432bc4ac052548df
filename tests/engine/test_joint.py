"""The distribution of three tokens in a row is the target's own, whoever drafts and however drafts are verified."""

import numpy as np
import pytest

from tests.decoding.goodness import FITS, MISFITS, chi_square_p
from tests.engine.joint import draw_continuations, expected_joint
from tests.fakes.table_engine import random_table
from workers.messages import LogitRules, SamplingParams, Verification

SEEDS = range(6_000)
TARGET, DRAFTER = random_table(51, 3, 0.5), random_table(135, 3, 0.7)
SAMPLINGS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.3, top_k=2),
    "top_p": SamplingParams(top_p=0.75),
    "min_p": SamplingParams(min_p=0.35),
    "penalties": SamplingParams(rules=LogitRules(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7)),
    "bias": SamplingParams(rules=LogitRules(logit_bias=((0, 0.8), (2, -0.4)))),
}


def check_joint(sampling: SamplingParams, verification: Verification) -> None:
    """Fail unless continuations come as often as the target's distribution says."""
    drawn = draw_continuations(TARGET, DRAFTER, sampling, verification, SEEDS)
    expected = expected_joint(TARGET, sampling)
    # Rejections at both positions and full acceptances all take part.
    assert drawn.accepted.min() > 0.03 * len(SEEDS)
    assert chi_square_p(drawn.counts, expected) > FITS
    # What the test can see: a part of the drafter's distribution mixed in.
    mixed = np.where(expected > 0, 0.7 * expected + 0.3 * expected_joint(DRAFTER, sampling), 0)
    assert chi_square_p(drawn.counts, mixed) < MISFITS


def check_greedy(temperature: float, draft_tokens: tuple[int, ...], spread: float = 1.5) -> None:
    """Fail unless every sequence is the target's greedy one, with a drafter that guesses otherwise."""
    target, drafter = random_table(3, 6, spread), random_table(4, 6, spread)
    expected = expected_joint(target, SamplingParams(temperature=0))
    for verification in Verification:
        sampling = SamplingParams(temperature=temperature)
        drawn = draw_continuations(target, drafter, sampling, verification, range(20), draft_tokens)
        assert drawn.counts[expected.argmax()] == 20


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("verification", Verification)
def test_the_joint_distribution_of_three_tokens_is_the_targets_own(verification: Verification, name: str) -> None:
    check_joint(SAMPLINGS[name], verification)


@pytest.mark.parametrize("verification", Verification)
def test_chains_that_end_where_the_drafter_is_unsure_change_no_distribution(verification: Verification) -> None:
    """By ratio that would show if drafts were left out for being improbable."""
    sampling, least = SamplingParams(), 0.42 if verification is Verification.RATIO else 0.65
    drawn = draw_continuations(TARGET, DRAFTER, sampling, verification, SEEDS, (2,), least_confidence=least)
    whole = draw_continuations(TARGET, DRAFTER, sampling, verification, SEEDS, (2,))
    assert 0.02 * len(SEEDS) < drawn.accepted[2] < 0.9 * whole.accepted[2]
    assert chi_square_p(drawn.counts, expected_joint(TARGET, sampling)) > FITS


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-7, 1e-5])
@pytest.mark.parametrize("draft_tokens", [(1,), (2, 1), (5,)])
def test_at_no_temperature_both_verifications_give_the_argmax(
    temperature: float, draft_tokens: tuple[int, ...]
) -> None:
    """B01 and B05 of the public faults: a drafter that guesses otherwise changes nothing."""
    check_greedy(temperature, draft_tokens)


def test_a_small_temperature_is_greedy_where_the_target_is_sure() -> None:
    """B05 of the public faults, with logits so far apart that nothing else is likely at 0.02."""
    check_greedy(0.02, (2, 1), spread=40)


def test_ratio_accepts_more_than_coupled_where_the_distributions_differ() -> None:
    """Ratio accepts 1 - TV, coupled at least (1 - TV) / (1 + TV), and both everything where there is no difference."""
    first = {}
    for verification in Verification:
        drawn = draw_continuations(TARGET, DRAFTER, SamplingParams(), verification, SEEDS)
        first[verification] = 1 - drawn.accepted[0] / len(SEEDS)
        same = draw_continuations(TARGET, TARGET, SamplingParams(), verification, range(2_000))
        assert same.accepted[2] == 2_000

    p, q = (np.exp(table[0, 1]) / np.exp(table[0, 1]).sum() for table in (TARGET, DRAFTER))
    distance = np.abs(p - q).sum() / 2
    assert first[Verification.RATIO] == pytest.approx(1 - distance, abs=0.02)
    assert (1 - distance) / (1 + distance) - 0.02 < first[Verification.COUPLED] < 1 - distance + 0.02
