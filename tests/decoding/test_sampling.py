"""Drawing tokens: exactly the warped distribution, row by row."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.decoding.dense import filter_scores
from tests.decoding.goodness import FITS, MISFITS, chi_square_p
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_tokens
from workers.decoding.warping import _running_sums_by_pairs, temperature_scores
from workers.messages import SamplingParams

LOGITS = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, 1.5, -1.0, 0.7, -0.2, 1.2, 0.4, -0.8])
NOTHING = -torch.inf


def draw(logits: torch.Tensor, sampling: SamplingParams, first_position: int = 0) -> list[int]:
    """Draw one token per row of `logits` [rows, V], at consecutive positions."""
    run = PositionRun(sampling, first_position, logits.shape[0])
    return [int(token) for token in draw_tokens(logits, SamplingRows.of_runs([run]))]


def warped(logits: torch.Tensor, sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """Enumerate the distribution that `sampling` asks for, straight from the definitions."""
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    best_first = sorted(range(len(weights)), key=lambda token: -weights[token])
    probable = [token for token in best_first if weights[token] >= sampling.min_p * weights.max()]
    kept = probable[: sampling.top_k] if sampling.top_k else probable
    nucleus: list[int] = []
    for token in kept:
        if weights[nucleus].sum() < sampling.top_p * weights[kept].sum():
            nucleus.append(token)
    probabilities = np.zeros(len(weights))
    probabilities[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.8),
        SamplingParams(min_p=0.25),
        # Min-p after top-p would keep one token more.
        SamplingParams(temperature=1.3, min_p=0.3, top_p=0.75),
        SamplingParams(temperature=1.2, min_p=0.2, top_k=6, top_p=0.9),
    ],
    ids=str,
)
def test_tokens_have_exactly_the_warped_distribution(sampling: SamplingParams) -> None:
    sampling = dataclasses.replace(sampling, seed=2026)

    counts = np.bincount(draw(LOGITS.expand(12_000, -1), sampling), minlength=len(LOGITS))

    assert chi_square_p(counts, warped(LOGITS, sampling)) > FITS
    hotter = dataclasses.replace(sampling, temperature=sampling.temperature * 1.4)
    assert chi_square_p(counts, warped(LOGITS, hotter)) < MISFITS


def test_the_choices_of_one_request_are_drawn_from_the_same_distribution() -> None:
    drawn = [draw(LOGITS.expand(1_000, -1), SamplingParams(seed=5, choice=choice)) for choice in range(10)]

    counts = np.bincount(np.concatenate(drawn), minlength=len(LOGITS))

    assert chi_square_p(counts, warped(LOGITS, SamplingParams())) > FITS
    assert len({tuple(tokens) for tokens in drawn}) == 10


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-12, 1e-7, 1e-5])
def test_tiny_temperatures_draw_the_most_likely_token(temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 5, (200, 50)).astype(np.float32))
    gaps = logits.topk(2).values
    logits = logits[(gaps[:, 0] - gaps[:, 1]) > 1e-3]  # 1e-3 / 1e-5 = 100, more than noise can make up for

    drawn = draw(logits, SamplingParams(temperature=temperature, top_p=0.9))

    assert len(drawn) > 190
    assert drawn == logits.argmax(dim=-1).tolist()


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (200, 50)).astype(np.float32))

    assert draw(logits, SamplingParams(temperature=5.0, top_k=1)) == logits.argmax(dim=-1).tolist()


def test_tiny_top_p_keeps_one_token() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 1, (200, 50)).astype(np.float32))

    assert draw(logits, SamplingParams(temperature=5.0, top_p=1e-9)) == logits.argmax(dim=-1).tolist()
    assert draw(logits, SamplingParams(temperature=5.0, top_p=0.0)) == logits.argmax(dim=-1).tolist()


def test_masked_tokens_are_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[[3, 5]] = NOTHING
    only = torch.full((12,), NOTHING)
    only[7] = -300.0

    drawn = draw(logits.expand(3_000, -1), SamplingParams(temperature=20.0))

    assert set(drawn) == set(range(12)) - {3, 5}
    assert set(draw(only.expand(50, -1), SamplingParams(temperature=20.0, top_p=0.5, top_k=4))) == {7}


def test_enormous_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3.1e38]])

    assert draw(logits[:1].expand(20, -1), SamplingParams(temperature=0.01)) == [0] * 20
    assert set(draw(logits[1:].expand(50, -1), SamplingParams(temperature=1e-3))) == {0, 1}


# --- rows ----------------------------------------------------------------------------------------------------

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-12, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 3),
)
runs = st.builds(PositionRun, sampling_params, st.integers(0, 5000), st.integers(0, 5))


def logits_of(run: PositionRun, vocabulary: int = 40) -> torch.Tensor:
    generator = np.random.default_rng([run.sampling.seed, run.first_position])
    return torch.from_numpy(generator.normal(0, 2, (run.positions, vocabulary)).astype(np.float32))


@given(st.lists(runs, min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_row_alone_gives_what_it_gives_in_a_batch(batch: list[PositionRun]) -> None:
    together = draw_tokens(torch.cat([logits_of(run) for run in batch]), SamplingRows.of_runs(batch)).tolist()

    alone = [
        token
        for run in batch
        for row, logits in enumerate(logits_of(run))
        for token in draw(logits[None], run.sampling, run.first_position + row)
    ]

    assert together == alone


def test_the_nucleus_of_a_row_does_not_depend_on_how_many_tokens_its_neighbours_keep() -> None:
    # Adversarial: top_p falls exactly on the mass before some token, where a sum in another order would decide.
    generator = np.random.default_rng(8)
    for _ in range(300):
        scores = torch.from_numpy(generator.normal(0, 2, (2, 64)).astype(np.float32))
        mass = scores[:1].topk(7).values.double().softmax(-1)
        top_p = mass.cumsum(-1)[0, int(generator.integers(0, 6))].float()
        top_k = torch.tensor([7, 0])

        alone = filter_scores(scores[:1], top_k[:1], top_p[None])
        beside = filter_scores(scores, top_k, torch.stack([top_p, torch.tensor(0.9)]))

        assert torch.equal(alone[0], beside[0])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_marked_and_leaves_its_neighbours_alone(poison: float) -> None:
    batch = [
        PositionRun(SamplingParams(temperature=t, top_p=0.9, top_k=9, seed=i), i, 1) for i, t in enumerate([0, 1, 1, 0])
    ]
    logits = torch.cat([logits_of(run) for run in batch])
    clean = draw_tokens(logits, SamplingRows.of_runs(batch)).tolist()

    for row in range(4):
        poisoned = logits.clone()
        poisoned[row, 17] = poison
        drawn = draw_tokens(poisoned, SamplingRows.of_runs(batch)).tolist()
        assert drawn == [*clean[:row], INVALID_TOKEN, *clean[row + 1 :]]


def test_a_row_where_everything_is_masked_is_marked() -> None:
    for temperature in (0.0, 1.0):
        assert draw(torch.full((1, 5), NOTHING), SamplingParams(temperature=temperature)) == [INVALID_TOKEN]


def test_drawing_leaves_the_logits_as_they_were() -> None:
    logits = LOGITS.repeat(4, 1)

    draw(logits, SamplingParams(temperature=0.5, top_k=3, top_p=0.5))

    assert torch.equal(logits, LOGITS.repeat(4, 1))


def test_no_rows_give_no_tokens() -> None:
    nothing = SamplingRows.of_runs([PositionRun(SamplingParams(), 5, 0)])

    assert draw_tokens(torch.empty(0, 12), nothing).tolist() == []


# --- warping -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1023])
def test_running_sums_by_pairs_depend_on_what_they_sum_alone(length: int) -> None:
    values = torch.from_numpy(np.random.default_rng(6).random((3, 1023)).astype(np.float32))

    sums = _running_sums_by_pairs(values[:1, :length])

    assert torch.equal(sums, _running_sums_by_pairs(values)[:1, :length])
    assert torch.allclose(sums.double(), values[:1, :length].double().cumsum(-1), rtol=1e-6)


def test_tokens_that_tie_at_the_border_of_a_filter_are_kept() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).log_softmax(-1)
    off = torch.tensor([0])

    by_k = filter_scores(scores, torch.tensor([2]), torch.tensor([1.0]))
    by_p = filter_scores(scores, off, scores.softmax(-1)[:, :2].sum(-1) * 0.99)

    assert by_k.isfinite().tolist() == [[True, True, True, True, False]]
    assert by_p.isfinite().tolist() == [[True, True, True, True, False]]


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 70),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
)
@settings(max_examples=80)
def test_filters_keep_what_those_of_transformers_keep(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (3, 64)).astype(np.float32))
    ids = torch.zeros((3, 1), dtype=torch.int64)

    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    scores = filter_scores(
        temperature_scores(logits, torch.full((3,), temperature)),
        torch.full((3,), top_k),
        torch.full((3,), top_p),
    )

    assert torch.equal(scores.isfinite(), expected.isfinite())
    assert torch.allclose(scores.softmax(-1), expected.softmax(-1), atol=1e-5)


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 5.0),
    min_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    top_k=st.sampled_from([0, 1, 5, 40]),
)
@settings(max_examples=80)
def test_min_p_keeps_what_that_of_transformers_keeps(seed: int, temperature: float, min_p: float, top_k: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (3, 64)).astype(np.float32))
    ids = torch.zeros((3, 1), dtype=torch.int64)

    expected = MinPLogitsWarper(min_p)(ids, TemperatureLogitsWarper(temperature)(ids, logits))
    # With top-k the order does not matter; with top-p it does, and vLLM's is another than that of transformers.
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    scores = temperature_scores(logits, torch.full((3,), temperature))
    scores = filter_scores(scores, torch.full((3,), top_k), torch.ones(3), torch.full((3,), min_p))

    assert torch.equal(scores.isfinite(), expected.isfinite())


def test_top_p_counts_only_what_min_p_left() -> None:
    # 0.5, 0.3, 0.2: min-p 0.5 leaves 0.5 and 0.3, of which 0.5 alone is 62 %.
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()

    assert set(draw(logits.expand(200, -1), SamplingParams(min_p=0.5, top_p=0.6))) == {0}
    assert set(draw(logits.expand(200, -1), SamplingParams(top_p=0.6))) == {0, 1}


def test_min_p_1_is_greedy_at_any_temperature() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (200, 50)).astype(np.float32))

    assert draw(logits, SamplingParams(temperature=5.0, min_p=1.0)) == logits.argmax(dim=-1).tolist()
