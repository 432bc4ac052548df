"""Draws that look at few tokens: the very ids that looking at all of them gives."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.decoding import sampling
from workers.decoding.noise import LARGEST_COMMON_NOISE, gumbel_noise, noise_keys
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_tokens, warped_scores
from workers.messages import SamplingParams

QWEN_IDS = 151_665  # not a multiple of any chunk
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", autouse=True, params=[0, sampling._SMALL_VOCABULARY], ids=["sparingly", "as served"])
def small_vocabulary(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small vocabularies are looked at whole; what looks at few tokens must give the same ids there too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_SMALL_VOCABULARY", request.param)
        yield


def naive_scores(logits: Logits, params: SamplingParams) -> Logits:
    """One row's warped scores, -inf for what the filters remove, from the definitions."""
    if params.temperature == 0:
        scores = np.full_like(logits, -np.inf)
        scores[np.argmax(logits)] = 0
        return scores
    with np.errstate(over="ignore", invalid="ignore"):
        temperature = max(np.float32(params.temperature), np.finfo(np.float32).tiny)
        scores = (logits - logits.max()) / temperature
    if params.min_p > 0:
        scores[scores < np.log(np.float32(params.min_p))] = -np.inf
    best_first = -np.sort(-scores)
    if params.top_k:
        best_first = best_first[: params.top_k]
    before = np.concatenate([[0.0], np.exp(best_first.astype(np.float64)).cumsum()])
    inside = before[:-1] < np.float32(params.top_p) * before[-1] if params.top_p < 1 else before[:-1] >= 0
    scores[scores < best_first[max(1, inside.sum()) - 1]] = -np.inf
    return scores


def naive_draws(logits: torch.Tensor, run: PositionRun) -> list[int]:
    """The argmax of all scores plus all noise."""
    keys = noise_keys(run.sampling.seed, run.sampling.choice, run.first_position, run.positions)
    ids = torch.arange(logits.shape[1], dtype=torch.int32)
    drawn = []
    for row, key in zip(logits.numpy(), keys, strict=True):
        if not np.isfinite(row.max()):
            drawn.append(INVALID_TOKEN)
            continue
        noise = gumbel_noise(torch.from_numpy(key[None]), ids)[0].numpy()
        drawn.append(int(np.argmax(naive_scores(row, run.sampling) + noise)))
    return drawn


def draws(logits: torch.Tensor, *runs: PositionRun) -> list[int]:
    drawn: list[int] = draw_tokens(logits, SamplingRows.of_runs(runs)).tolist()
    return drawn


# --- rows of all kinds ---------------------------------------------------------------------------------------

Shape = tuple[int, int]


def peaked(generator: np.random.Generator, shape: Shape) -> Logits:
    logits = generator.normal(0, 2.5, shape)
    logits[:, generator.integers(0, shape[1], 5)] += 15
    return logits.astype(np.float32)


def partly_banned(generator: np.random.Generator, shape: Shape) -> Logits:
    logits = generator.normal(0, 3, shape)
    logits[generator.random(shape) < 0.9] = -np.inf
    return logits.astype(np.float32)


def with_poison(generator: np.random.Generator, shape: Shape) -> Logits:
    logits = generator.normal(0, 1, shape)
    for row in range(1, shape[0]):
        logits[row, generator.integers(0, shape[1])] = generator.choice([np.nan, np.inf])
    return logits.astype(np.float32)


KINDS: dict[str, Callable[[np.random.Generator, Shape], Logits]] = {
    "normal": lambda generator, shape: generator.normal(0, 2.5, shape).astype(np.float32),
    "peaked": peaked,
    "nearly flat": lambda generator, shape: generator.uniform(-1e-3, 1e-3, shape).astype(np.float32),
    "constant": lambda generator, shape: np.full(shape, generator.normal(), dtype=np.float32),
    "many ties": lambda generator, shape: generator.integers(-4, 4, shape).astype(np.float32),
    "partly banned": partly_banned,
    "all banned": lambda _, shape: np.full(shape, -np.inf, dtype=np.float32),
    "enormous": lambda generator, shape: generator.uniform(-3e38, 3e38, shape).astype(np.float32),
    "ascending": lambda _, shape: np.broadcast_to(np.linspace(-20, 0, shape[1], dtype=np.float32), shape).copy(),
    "NaN and inf": with_poison,
}

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 1e-4, 0.3, 0.7, 1.0, 1.0, 2.0, 30.0, 1e9]),
    top_k=st.sampled_from([0, 0, 0, 1, 2, 50, 129, 1000, 2**40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9871, 0.9113, 0.5127, 0.0713]),
    min_p=st.sampled_from([0.0, 0.0, 0.0001, 0.0513, 0.31, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 3),
)


def logits_of(kind: str, run: PositionRun, vocabulary: int) -> torch.Tensor:
    generator = np.random.default_rng([run.sampling.seed, run.first_position])
    return torch.from_numpy(KINDS[kind](generator, (run.positions, vocabulary)))


runs = st.builds(PositionRun, sampling_params, st.integers(0, 5000), st.integers(1, 4))
vocabularies = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 4096]), st.integers(1, 6000))


@given(run=runs, kind=st.sampled_from(list(KINDS)), vocabulary=vocabularies)
@settings(max_examples=120)
def test_the_ids_are_those_of_all_scores_and_all_noise(run: PositionRun, kind: str, vocabulary: int) -> None:
    logits = logits_of(kind, run, vocabulary)

    assert draws(logits, run) == naive_draws(logits, run)


@pytest.mark.parametrize("kind", ["normal", "peaked", "nearly flat", "many ties", "partly banned"])
@pytest.mark.parametrize("vocabulary", [152_000, QWEN_IDS])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=0.7, top_p=0.9113),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=1.0, top_k=5000, top_p=0.5127),
        SamplingParams(temperature=1.0, min_p=0.05),
    ],
    ids=str,
)
def test_the_ids_of_large_vocabularies_are_those_of_all_scores_and_all_noise(
    kind: str, vocabulary: int, sampling: SamplingParams
) -> None:
    run = PositionRun(sampling, 77, 3)
    logits = logits_of(kind, run, vocabulary)

    assert draws(logits, run) == naive_draws(logits, run)


@given(
    batch=st.lists(st.tuples(runs, st.sampled_from(list(KINDS))), min_size=2, max_size=5),
    vocabulary=st.sampled_from([40, 700, 9000, 20_000]),
)
@settings(max_examples=60)
def test_rows_of_any_kind_alone_give_what_they_give_in_a_batch(
    batch: list[tuple[PositionRun, str]], vocabulary: int
) -> None:
    logits = torch.cat([logits_of(kind, run, vocabulary) for run, kind in batch])
    rows = SamplingRows.of_runs([run for run, _ in batch])
    tokens, scores = draw_tokens(logits, rows), warped_scores(logits, rows)

    for row in range(len(logits)):
        alone, index = logits[row : row + 1].clone(), torch.tensor([row])
        assert torch.equal(draw_tokens(alone, rows.select(index)), tokens[index])
        assert torch.equal(warped_scores(alone, rows.select(index)).nan_to_num(7.0), scores[index].nan_to_num(7.0))


@given(run=runs, kind=st.sampled_from(list(KINDS)), vocabulary=vocabularies)
@settings(max_examples=80)
def test_warped_scores_are_what_is_drawn_from(run: PositionRun, kind: str, vocabulary: int) -> None:
    logits = logits_of(kind, run, vocabulary)

    scores = warped_scores(logits, SamplingRows.of_runs([run]))

    for row, warped in zip(logits.numpy(), scores.numpy(), strict=True):
        if np.isfinite(row.max()):
            np.testing.assert_array_equal(warped, naive_scores(row, run.sampling))
        else:
            assert np.isnan(warped).all()


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)])
def test_logits_may_be_a_part_of_a_larger_tensor(sampling: SamplingParams) -> None:
    padded = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (7, 2048)).astype(np.float32))
    run = PositionRun(sampling, 5, 3)

    for part in (padded[2:5, :1999], padded[2:5, 10:1500], padded[::3, :1999], padded.T[100:103, :], padded[:1, :99]):
        rows = SamplingRows.of_runs([PositionRun(sampling, 5, len(part))])
        assert draw_tokens(part, rows).tolist() == draw_tokens(part.clone(), rows).tolist()
    assert draws(padded[1].expand(3, -1), run) == draws(padded[1].repeat(3, 1), run)


@pytest.mark.parametrize("top_k", [1, 10, 24, 30, 64])
def test_ids_in_which_two_chunks_overlap_count_once(top_k: int) -> None:
    # 9,000 is no multiple of a chunk's width, so that the last chunk is moved into the one before it.
    logits = torch.from_numpy(np.random.default_rng(4).permutation(9000).astype(np.float32))
    logits[-128:] += 9000

    scores = warped_scores(logits[None], SamplingRows.of_runs([PositionRun(SamplingParams(top_k=top_k), 0, 1)]))

    assert scores[0].isfinite().nonzero().squeeze(-1).tolist() == sorted(logits.topk(top_k).indices.tolist())


# --- noise that is rarer than one in a vocabulary ------------------------------------------------------------


@pytest.mark.parametrize("lead", [-0.001, 0.001])
def test_a_token_far_behind_wins_by_its_noise_alone(lead: float) -> None:
    """The favourite is behind or ahead of the token with the largest noise by next to nothing, noise added."""
    vocabulary, positions = 152_000, 40
    keys = torch.from_numpy(noise_keys(1, 0, 0, positions))
    largest = []
    for row, key in enumerate(keys.split(1)):
        noise = gumbel_noise(key, torch.arange(vocabulary, dtype=torch.int32))[0]
        token = int(noise.argmax())
        favourite = (token + 70_000) % vocabulary
        behind = noise[token] - noise[favourite] - lead
        logits = torch.full((1, vocabulary), -60.0)
        # Chunks that are likelier than the token's, so that no luck leads to it.
        logits[0, (token + 1000 * torch.arange(1, 40)) % vocabulary] = 0.001 - behind
        logits[0, favourite] = 0.0
        logits[0, token] = -behind
        largest.append(float(noise[token]))

        assert draws(logits, PositionRun(SamplingParams(seed=1), row, 1)) == [token if lead > 0 else favourite]
        # A filter takes the token out whatever its noise.
        assert draws(logits, PositionRun(SamplingParams(seed=1, top_k=1), row, 1)) == [favourite]
        assert draws(logits, PositionRun(SamplingParams(seed=1, min_p=0.01), row, 1)) == [favourite]
    assert min(largest) < LARGEST_COMMON_NOISE - 2 and sum(noise > LARGEST_COMMON_NOISE for noise in largest) > 5
