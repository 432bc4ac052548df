"""The noise: uniform, Gumbel, independent in every coordinate, and the same for ever."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.decoding.goodness import FITS, MISFITS, uniform_p
from workers.decoding.noise import (
    LARGEST_COMMON_NOISE,
    LARGEST_NOISE,
    bits_bound,
    gumbel_noise,
    hash_bits,
    noise_keys,
    rare_ids,
)

Bits = npt.NDArray[np.uint32]
LARGEST_SEED = 2**63 - 1
MASK = 0xFFFFFFFF


def bits(keys: npt.NDArray[np.int32], ids: npt.ArrayLike) -> Bits:
    """Hash bits, uint32 [rows, ids]."""
    drawn = hash_bits(torch.from_numpy(keys), torch.as_tensor(np.asarray(ids, dtype=np.int32)))
    return drawn.numpy().view(np.uint32)


def grid(seed: int = 7, choice: int = 0, first_position: int = 0, first_id: int = 0) -> Bits:
    """Hash bits of 400 positions and 1,000 token ids."""
    return bits(noise_keys(seed, choice, first_position, 400), np.arange(first_id, first_id + 1000))


def seed_grid(change: Callable[[int], int]) -> Bits:
    """Hash bits of 400 changed seeds at one position, and 1,000 token ids."""
    keys = np.concatenate([noise_keys(change(seed), 0, 11, 1) for seed in range(400)])
    return bits(keys, np.arange(1000))


# --- one value -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 7, 15, 23, 24])
def test_every_byte_of_the_hash_is_uniform(shift: int) -> None:
    values = bits(noise_keys(1, 0, 0, 250), np.arange(4000)).astype(np.int64)

    p = uniform_p((values >> shift) & 0xFF, 256)

    # Two-sided: values that are spread too evenly would not be random either.
    assert FITS < p < 1 - FITS


def test_ids_alone_would_not_pass_for_uniform() -> None:
    # What the test above would say of a multiplicative hash without the finaliser.
    weak = (np.arange(4000, dtype=np.int64)[None, :] * 0x9E3779B9 + np.arange(250)[:, None]) & MASK

    p = uniform_p((weak >> 24) & 0xFF, 256)

    assert not FITS < p < 1 - FITS


def test_the_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.from_numpy(noise_keys(3, 0, 0, 250)), torch.arange(4000, dtype=torch.int32)).numpy()

    # The largest distance of a million samples exceeds FITS' bound by chance once in a million; a scale or a
    # location that is wrong by 2 % moves the distribution by 0.7 %, five times as far.
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > FITS
    assert stats.kstest(noise.ravel(), stats.gumbel_r(scale=1.02).cdf).pvalue < MISFITS
    assert stats.kstest(noise.ravel(), stats.gumbel_r(loc=0.02).cdf).pvalue < MISFITS


def test_large_noise_which_decides_who_wins_is_as_frequent_as_it_should_be() -> None:
    noise = gumbel_noise(torch.from_numpy(noise_keys(4, 0, 0, 250)), torch.arange(40_000, dtype=torch.int32)).numpy()

    # 10 million samples: the count over each bound is Poisson; 6 sigma is once in 500 million. A noise from 16 bits
    # instead of 31 would show none at all above 12.
    for bound in (6.0, 8.0, 10.0, 12.0):
        expected = noise.size * stats.gumbel_r.sf(bound)
        assert abs(np.count_nonzero(noise > bound) - expected) < 6 * expected**0.5


# --- two values ----------------------------------------------------------------------------------------------

PAIRS = {
    "neighbouring ids": lambda: (grid(), grid(first_id=1)),
    "ids far apart": lambda: (grid(), grid(first_id=1 << 16)),
    "neighbouring positions": lambda: (grid(), grid(first_position=1)),
    "positions far apart": lambda: (grid(), grid(first_position=4096)),
    "neighbouring ids and positions": lambda: (grid(), grid(first_position=1, first_id=1)),
    "choices 0 and 1": lambda: (grid(), grid(choice=1)),
    "a choice more, a position less": lambda: (grid(first_position=1), grid(choice=1)),
    "a seed more, a position less": lambda: (grid(seed=7, first_position=1), grid(seed=8)),
    "a seed more, a choice less": lambda: (grid(seed=7, choice=1), grid(seed=8)),
    "seeds s and s + 1": lambda: (seed_grid(lambda s: 2 * s), seed_grid(lambda s: 2 * s + 1)),
    "seeds that differ in bit 62": lambda: (seed_grid(lambda s: s), seed_grid(lambda s: s + (1 << 62))),
    "seeds that differ in bit 32": lambda: (seed_grid(lambda s: s), seed_grid(lambda s: s + (1 << 32))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_noise_is_independent_between(name: str) -> None:
    first, second = PAIRS[name]()

    for shift in (0, 13, 27):  # 16 x 16 cells of the lowest, the middle and the highest bits that the noise uses
        cells = (((first >> shift) & 15).astype(np.int64) << 4) | ((second >> shift) & 15)
        assert FITS < uniform_p(cells, 256) < 1 - FITS
    # 400,000 pairs: the correlation of independent noise has a standard deviation of 1 / sqrt(n).
    correlation = np.corrcoef(first.ravel() & 0x7FFFFFFF, second.ravel() & 0x7FFFFFFF)[0, 1]
    assert abs(correlation) < 5.5 / first.size**0.5


def test_dependence_of_a_single_shared_bit_would_be_noticed() -> None:
    first, second = grid(), grid(first_id=1)
    shared = second ^ ((second ^ first) & np.uint32(1)) * (np.arange(1000, dtype=np.uint32) % 50 == 0)

    cells = ((first & 15).astype(np.int64) << 4) | (shared & 15)

    assert uniform_p(cells, 256) < 1e-6  # one bit, shared in 2 % of the pairs


@pytest.mark.parametrize(("coordinate", "width"), [("seed", 63), ("choice", 10), ("position", 20), ("token id", 18)])
def test_flipping_one_input_bit_flips_every_output_bit_half_of_the_time(coordinate: str, width: int) -> None:
    samples = 600
    generator = np.random.default_rng(5)
    inputs = {
        "seed": generator.integers(0, LARGEST_SEED, samples),
        "choice": generator.integers(0, 1 << 10, samples),
        "position": generator.integers(0, 1 << 20, samples),
        "token id": generator.integers(0, 1 << 18, samples),
    }

    def hashed(values: dict[str, npt.NDArray[np.int64]]) -> Bits:
        keys = [
            noise_keys(int(seed), int(choice), int(position), 1)
            for seed, choice, position in zip(values["seed"], values["choice"], values["position"], strict=True)
        ]
        return bits(np.concatenate(keys), values["token id"][:, None])[:, 0]

    unflipped = hashed(inputs)
    for bit in range(width):
        flips = hashed(inputs | {coordinate: inputs[coordinate] ^ (1 << bit)}) ^ unflipped
        rates = ((flips[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
        # 111 input times 32 output bits are looked at; 6 sigma of a fair coin happens to any of them once in
        # 100,000 runs, and a bit that follows the input, or ignores it, is 24 sigma off.
        assert np.abs(rates - 0.5).max() < 6 * 0.5 / samples**0.5


# --- the same for ever ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "choice", "position", "expected"),
    [
        (0, 0, 0, [1418070190, 1869591317, -1850314653, -1980022515, 1370271400]),
        (0, 0, 1, [419144410, -1341108023, -1855109682, 974357346, 617956635]),
        (0, 1, 0, [661924010, 1575797422, 1138149746, -356800207, 271489634]),
        (1, 0, 0, [-1293064032, -1547441639, 1486623995, 1774342483, -1704543723]),
        (42, 0, 17, [185110774, -75496180, 868894861, -2142013591, -1050173923]),
        (2**32, 0, 0, [2114841698, 1659796551, -523757307, -163482467, 1561209851]),
        (LARGEST_SEED, 3, 131_071, [-1336490125, -2085505858, -1461081436, -1202112502, -2070722928]),
    ],
)
def test_hash_bits_never_change(seed: int, choice: int, position: int, expected: list[int]) -> None:
    keys = torch.from_numpy(noise_keys(seed, choice, position, 1))

    drawn = hash_bits(keys, torch.tensor([0, 1, 2, 1000, 151_935], dtype=torch.int32))

    assert drawn.dtype is torch.int32
    assert drawn[0].tolist() == expected


@given(
    seed=st.integers(0, LARGEST_SEED),
    choice=st.integers(0, 127),
    position=st.integers(0, 10_000_000),
    positions=st.integers(0, 4),
)
@example(seed=0, choice=0, position=0, positions=4)
@example(seed=LARGEST_SEED, choice=127, position=10_000_000, positions=4)
@example(seed=2**32, choice=0, position=0, positions=1)
@settings(max_examples=50)
def test_every_seed_gives_finite_noise_that_does_not_depend_on_where_a_run_begins(
    seed: int, choice: int, position: int, positions: int
) -> None:
    keys = noise_keys(seed, choice, position, positions)
    noise = gumbel_noise(torch.from_numpy(keys), torch.arange(100, dtype=torch.int32))

    assert keys.dtype == np.int32
    assert keys.shape == (positions, 2)
    assert noise.dtype is torch.float32
    assert noise.shape == (positions, 100)
    assert bool(noise.isfinite().all())
    for row in range(positions):
        assert np.array_equal(keys[row : row + 1], noise_keys(seed, choice, position + row, 1))


@given(st.lists(st.integers(0, 151_935), min_size=1, max_size=20))
@settings(max_examples=50)
def test_noise_of_some_ids_is_that_of_the_full_row(ids: list[int]) -> None:
    keys = torch.from_numpy(noise_keys(9, 1, 100, 2))
    chosen = torch.tensor(ids, dtype=torch.int32)
    whole = gumbel_noise(keys, torch.arange(151_936, dtype=torch.int32))

    assert torch.equal(gumbel_noise(keys, chosen), whole[:, ids])
    assert torch.equal(gumbel_noise(keys, chosen.expand(2, -1)), whole[:, ids])


def id_that_hashes_to(value: int, keys: npt.NDArray[np.int32]) -> int:
    """Walk the hash backwards: every step of it can be undone, so each value belongs to exactly one id."""
    first, second = (int(half) & MASK for half in keys[0])

    def unshifted(mixed: int, shift: int) -> int:
        restored = mixed
        for _ in range(3):
            restored = mixed ^ (restored >> shift)
        return restored

    def divided(product: int, factor: int) -> int:
        return (product * pow(factor, -1, 1 << 32)) & MASK

    value = divided(unshifted(value, 15), 0x735A2D97)
    value = divided(unshifted(value, 15), 0x21F0AAAD)
    value = divided(unshifted(value, 16) ^ second, 0x846CA68B)
    value = divided(unshifted(value, 15), 0x7FEB352D)
    token = divided((unshifted(value, 16) - first) & MASK, 0x9E3779B9)
    return token - (1 << 32) if token >= 1 << 31 else token


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, MASK])
def test_noise_is_finite_at_the_ends_of_the_hash_range(value: int) -> None:
    keys = noise_keys(0, 0, 0, 1)
    token = id_that_hashes_to(value, keys)

    noise = float(gumbel_noise(torch.from_numpy(keys), torch.tensor([token], dtype=torch.int32)))

    assert int(bits(keys, [token])[0, 0]) == value
    exact = -np.log(-np.log1p(-((value & 0x7FFFFFFF) + 0.5) / 2**31))
    # The smallest noise is cut off where float32 cannot tell 1 - w from 0; nobody wins there.
    assert noise == pytest.approx(max(exact, -np.log(24 * np.log(2))), abs=1e-4)


# --- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 1000, 152_000])
def test_rare_ids_are_all_ids_with_more_than_common_noise(vocabulary: int) -> None:
    keys = noise_keys(8, 1, 0, 60)
    noise = gumbel_noise(torch.from_numpy(keys), torch.arange(vocabulary, dtype=torch.int32))

    rows, ids = rare_ids(torch.from_numpy(keys), vocabulary)

    listed = torch.zeros_like(noise, dtype=torch.bool)
    listed[rows, ids] = True
    assert noise[~listed].max() <= LARGEST_COMMON_NOISE + 1e-4
    assert bool((noise[listed] > LARGEST_COMMON_NOISE - 1e-4).all())
    # 60 rows of 152,000 ids have 17.4 in the mean.
    assert 5 < len(rows) < 35 if vocabulary == 152_000 else len(rows) < 3


@pytest.mark.parametrize("noise", [*np.linspace(-3.3, 22.1, 50), 13.1, 13.2, -2.0, -1.999])
def test_hash_bits_above_the_bound_have_less_noise(noise: float) -> None:
    bound = int(bits_bound(torch.tensor([noise], dtype=torch.float32)))
    keys = noise_keys(0, 0, 0, 1)

    def noise_at(value: int) -> float:
        ids = torch.tensor([id_that_hashes_to(value, keys)], dtype=torch.int32)
        return float(gumbel_noise(torch.from_numpy(keys), ids))

    assert bound == 0x7FFFFFFF or noise_at(bound + 1) < noise
    # Nor is the bound of no use: a little below it there is as much noise.
    assert noise < -2 or noise_at(int(bound * 0.97)) >= noise


def test_no_noise_is_larger_than_the_largest() -> None:
    keys = noise_keys(0, 0, 0, 1)
    ids = torch.tensor([id_that_hashes_to(0, keys)], dtype=torch.int32)

    assert float(gumbel_noise(torch.from_numpy(keys), ids)) == pytest.approx(LARGEST_NOISE, abs=1e-4)
