"""Runners-up of draws, against sorting all sums of score and noise."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.test_race import KINDS, naive_draws, naive_scores, sampling_params
from workers.decoding import sampling
from workers.decoding.noise import gumbel_noise, noise_keys
from workers.decoding.sampling import PositionRun, SamplingRows, draw_tokens, draw_with_runners_up
from workers.messages import SamplingParams


@pytest.fixture(scope="module", autouse=True, params=[0, sampling._SMALL_VOCABULARY], ids=["sparingly", "as served"])
def small_vocabulary(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_SMALL_VOCABULARY", request.param)
        yield


def sums_of(logits: torch.Tensor, run: PositionRun) -> np.ndarray:
    """Score plus noise of everything, in units of logits, [rows, V]."""
    params = run.sampling
    if params.temperature == 0:
        return logits.numpy()
    keys = noise_keys(params.seed, params.choice, run.first_position, run.positions)
    noise = gumbel_noise(torch.from_numpy(keys), torch.arange(logits.shape[1], dtype=torch.int32)).numpy()
    return np.stack([naive_scores(row, params) for row in logits.numpy()]) * 1.0 + noise


samplings = st.one_of(sampling_params.filter(lambda params: params.temperature == 0 or 0.1 < params.temperature < 10))


@given(samplings, st.sampled_from(["normal", "peaked", "partly banned", "many ties"]), st.integers(2, 500))
@settings(max_examples=80)
def test_the_next_best_come_next_and_lack_what_they_lack(params: SamplingParams, kind: str, vocabulary: int) -> None:
    run = PositionRun(params, 5, 3)
    logits = torch.from_numpy(KINDS[kind](np.random.default_rng(params.seed), (3, vocabulary)))
    rows = SamplingRows.of_runs([run])
    draws = draw_with_runners_up(logits, rows, 3)
    assert draws.tokens.tolist() == naive_draws(logits, run)
    assert torch.equal(draw_tokens(logits, rows), draws.tokens)
    if vocabulary > 8 * 64:
        return
    scale = params.temperature or 1.0
    for row, sums in enumerate(sums_of(logits, run)):
        order = [token for token in np.argsort(-sums, kind="stable") if np.isfinite(sums[token])]
        winner, there, gaps = int(draws.tokens[row]), draws.runners_up[row], draws.gaps[row]
        if winner < 0:
            continue
        assert len(there) == min(3, len(order) - 1) and len({winner, *there}) == len(there) + 1
        expected = [(sums[order[0]] - sums[token]) * scale for token in order[1:4]]
        np.testing.assert_allclose(gaps, expected, rtol=1e-4, atol=1e-4 * scale)
        np.testing.assert_allclose(
            [(sums[winner] - sums[token]) * scale for token in there], expected, rtol=1e-4, atol=1e-4 * scale
        )


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=4)])
def test_runners_up_of_large_vocabularies_are_nearly_always_the_next_best(params: SamplingParams) -> None:
    run = PositionRun(params, 0, 40)
    logits = torch.from_numpy(KINDS["peaked"](np.random.default_rng(2), (40, 20_001)))
    draws = draw_with_runners_up(logits, SamplingRows.of_runs([run]), 3)
    best = torch.from_numpy(sums_of(logits, run)).topk(4, dim=-1).indices
    assert torch.equal(draws.tokens, best[:, 0])
    assert (np.array(draws.runners_up) == best[:, 1:].numpy()).mean() > (0.8 if params.temperature else 0.999)


def test_greedy_and_sampled_rows_share_a_batch_and_do_not_touch_each_other() -> None:
    runs = [PositionRun(SamplingParams(temperature=each, seed=9), 3, 2) for each in (0.0, 1.0, 0.0)]
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 3, (6, 700)).astype(np.float32))
    logits[5, 3] = torch.nan
    together = draw_with_runners_up(logits, SamplingRows.of_runs(runs), 2)
    for index, run in enumerate(runs):
        part = slice(2 * index, 2 * index + 2)
        alone = draw_with_runners_up(logits[part].clone(), SamplingRows.of_runs([run]), 2)
        rows = slice(0, 1) if index == 2 else slice(0, 2)
        assert alone.runners_up[rows] == together.runners_up[part][rows]
        assert torch.equal(alone.tokens, together.tokens[part])
    assert together.tokens[5] == sampling.INVALID_TOKEN
