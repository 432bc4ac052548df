"""Verification by ratio, row by row: edges of the rule, and the drafter's sparse q."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.goodness import FITS, MISFITS, chi_square_p
from workers.decoding.noise import Stream
from workers.decoding.ratio import (
    Q_TOKENS,
    RatioChain,
    accepted_drafts,
    draw_sparsely,
    uniform_numbers,
    verify_by_ratio,
)
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows
from workers.decoding.verification import VerifiedChain
from workers.messages import SamplingParams, SparseProbabilities, token_ids

PLAIN = SamplingParams()


def chain(drafts: list[int], q: list[list[float]], uniforms: list[float]) -> RatioChain:
    """A chain whose q is given for all token ids."""
    ids = np.tile(np.arange(len(q[0]), dtype=np.int32), (len(q), 1))
    return RatioChain(
        token_ids(drafts), SparseProbabilities(ids, np.array(q, dtype=np.float32)), np.array(uniforms, dtype=float)
    )


def verify(p: list[list[float]], verified: RatioChain, sampling: SamplingParams = PLAIN) -> VerifiedChain:
    """Verify one chain at position 7 against a target with the distributions `p`."""
    logits = torch.tensor(p, dtype=torch.float32).log()
    rows = SamplingRows.of_runs([PositionRun(sampling, 7, len(p))])
    [outcome] = verify_by_ratio(logits, rows, [verified])
    return outcome


def check_edges() -> None:
    """B03 of the public faults: fail unless a draft that the target cannot give is rejected, whatever u is."""
    impossible = verify([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], chain([0], [[1.0, 0.0, 0.0]], [0.0]))
    assert impossible.accepted == 0
    assert impossible.token_ids.tolist()[0] in (1, 2)


def test_a_draft_that_the_target_cannot_give_is_rejected() -> None:
    check_edges()


def test_a_rejection_where_p_and_q_are_equal_draws_from_p() -> None:
    """B03: the residual has no mass then."""
    same = [0.25, 0.25, 0.5]
    counts = np.zeros(3, dtype=np.int64)
    for seed in range(2_000):
        outcome = verify([same, same], chain([1], [same], [1.0]), SamplingParams(seed=seed))
        assert outcome.accepted == 0
        counts[outcome.token_ids[0]] += 1
    assert chi_square_p(counts, np.array(same)) > FITS
    assert chi_square_p(counts, np.array([0.35, 0.25, 0.4])) < MISFITS


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-7, 1e-5])
@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999])
def test_without_temperature_the_argmax_comes_whatever_the_drafter_is_sure_of(
    temperature: float, uniform: float
) -> None:
    """B01 and B05."""
    sampling = SamplingParams(temperature=temperature)
    p = [[0.3, 0.5, 0.1, 0.1]] * 2
    wrong = chain([0], [[0.28, 0.24, 0.24, 0.24]], [uniform])
    right = chain([1], [[0.0, 1.0, 0.0, 0.0]], [uniform])

    assert verify(p, wrong, sampling).token_ids.tolist() == [1]
    assert verify(p, right, sampling).token_ids.tolist() == [1, 1]


@pytest.mark.parametrize("top_k", [0, 1, 2])
def test_a_target_that_drafts_for_itself_is_always_right(top_k: int) -> None:
    """B03: also where filters leave a single token."""
    logits = torch.tensor([[0.3, 1.2, -0.4, 0.9]])
    for seed in range(200):
        sampling = SamplingParams(seed=seed, top_k=top_k)
        runs = [PositionRun(sampling, 7, 1)]
        drawn = draw_sparsely(logits, SamplingRows.of_runs(runs, stream=Stream.DRAFT))
        q = SparseProbabilities(drawn.ids.astype(np.int32), drawn.q)
        proposal = RatioChain(token_ids(drawn.tokens.tolist()), q, uniform_numbers(runs)[0])
        rows = SamplingRows.of_runs([PositionRun(sampling, 7, 2)])
        [outcome] = verify_by_ratio(logits.repeat(2, 1), rows, [proposal])
        assert outcome.accepted == 1


def test_chains_of_all_lengths_are_verified_in_one_call() -> None:
    p = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    sure = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    chains = [chain([1, 2], sure[:2], [0.9, 0.9]), chain([2], sure[1:2], [0.5]), chain([1], sure[:1], [0.0])]
    logits = torch.tensor([*p, *p[:2], *p[:2]]).log()
    rows = SamplingRows.of_runs([PositionRun(PLAIN, 3, 3), PositionRun(PLAIN, 9, 2), PositionRun(PLAIN, 4, 2)])

    outcomes = verify_by_ratio(logits, rows, chains)

    assert [outcome.accepted for outcome in outcomes] == [2, 0, 1]
    assert [outcome.token_ids.tolist() for outcome in outcomes] == [[1, 2, 0], [1], [1, 2]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_ends_its_own_chain_only(bad: float) -> None:
    sure = [[0.0, 1.0, 0.0]]
    logits = torch.zeros(6, 3)
    logits[:, 1] = 50.0
    logits[1] = bad  # the bonus of the first chain
    logits[4] = bad  # the first position of the third
    rows = SamplingRows.of_runs([PositionRun(PLAIN, 3, 2)] * 3)

    outcomes = verify_by_ratio(logits, rows, [chain([1], sure, [0.5])] * 3)

    assert [outcome.token_ids.tolist() for outcome in outcomes] == [[1, INVALID_TOKEN], [1, 1], [INVALID_TOKEN]]


def test_the_sparse_q_is_what_drafts_are_drawn_from() -> None:
    vocabulary, draws = 300, 6_000
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1.0, vocabulary).astype(np.float32))
    runs = [PositionRun(SamplingParams(seed=seed), 3, 1) for seed in range(draws)]
    drawn = draw_sparsely(logits.expand(draws, -1), SamplingRows.of_runs(runs, stream=Stream.DRAFT))

    assert drawn.q.shape == (draws, Q_TOKENS)
    assert set(drawn.ids[0]) == set(logits.topk(Q_TOKENS).indices.tolist())
    assert drawn.q[0].sum() == pytest.approx(1, abs=1e-5)
    q: npt.NDArray[np.float64] = np.zeros(vocabulary)
    q[drawn.ids[0]] = drawn.q[0]
    counts = np.bincount(drawn.tokens, minlength=vocabulary)
    assert chi_square_p(counts, q) > FITS
    assert chi_square_p(counts, np.where(q > 0, q**0.75, 0)) < MISFITS


@given(
    uniforms=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6),
    p=st.lists(st.integers(0, 64).map(lambda n: n / 64), min_size=6, max_size=6),
    q=st.lists(st.integers(0, 64).map(lambda n: n / 64), min_size=6, max_size=6),
)
@settings(max_examples=80)
def test_the_drafts_kept_are_those_before_the_first_rejection(
    uniforms: list[float], p: list[float], q: list[float]
) -> None:
    k = len(uniforms)
    kept = accepted_drafts(np.array(uniforms), np.array(q[:k]), np.array(p[:k]))
    passes = [p_i > 0 and (q_i == 0 or u < p_i / q_i) for u, q_i, p_i in zip(uniforms, q, p, strict=False)]
    # A quotient can round to u exactly; then either answer is right.
    close = any(q_i > 0 and abs(u - p_i / q_i) < 1e-12 for u, q_i, p_i in zip(uniforms, q, p, strict=False))
    assert close or kept == next((index for index, passed in enumerate(passes) if not passed), k)


def test_uniform_numbers_depend_on_seed_choice_and_position() -> None:
    asked = (SamplingParams(seed=1), 0, 4_000), (SamplingParams(seed=1), 5, 3), (SamplingParams(seed=2), 0, 50)
    runs = [PositionRun(*each) for each in (*asked, (SamplingParams(seed=1, choice=1), 0, 50))]
    many, part, other_seed, other_choice = uniform_numbers(runs)
    assert many.min() >= 0 and many.max() < 1
    assert chi_square_p(np.bincount((many * 16).astype(np.int64), minlength=16), np.full(16, 1 / 16)) > FITS
    assert part.tolist() == many[5:8].tolist()
    assert not np.isin(other_seed, many).any()
    assert not np.isin(other_choice, many).any()
