"""Counter-based Gumbel noise: the same numbers for (seed, choice, position, token id) on every device.

The draw of a token is y = argmax over v of (log p[v] + noise[v]) with independent standard Gumbel noise, an exact
sample of p (Gumbel-max; Maddison, Tarlow and Minka 2014). The noise is a function of integers alone, so that any
process can compute it for any position, and drafts cannot change it.
"""

import math
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_INT32_MIN = -(1 << 31)
# Work on this many numbers at a time, so that the int32 and float32 temporaries stay in the L2 cache.
_BLOCK_NUMBERS = 65_536
# An accelerator wants few large steps instead; this many numbers are 64 MiB.
_BLOCK_NUMBERS_ELSEWHERE = 1 << 24


def _mix_64(value: int) -> int:
    """Return the SplitMix64 finaliser of a 64-bit integer (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


class Stream(IntEnum):
    """What numbers are used for. Verification by ratio needs all three, independent of each other."""

    DRAW = 0  # the target's draws; a drafter that is coupled to it uses the same
    DRAFT = 1  # a drafter's own draws
    ACCEPT = 2  # whether a draft is accepted


def noise_keys(
    seed: int, choice: int, first_position: int, positions: int, stream: Stream = Stream.DRAW
) -> npt.NDArray[np.int32]:
    """Return int32 [positions, 2]: one 64-bit key per position, `first_position` onwards.

    `seed` is 0 to 2**63 - 1. Positions are absolute, the prompt included.
    """
    sequence = _mix_64((_mix_64((seed + _GOLDEN_GAMMA) & _MASK_64) + choice * _GOLDEN_GAMMA) & _MASK_64)
    if stream is not Stream.DRAW:
        sequence = _mix_64(sequence ^ stream)
    keys = [
        _mix_64((sequence + (position + 1) * _GOLDEN_GAMMA) & _MASK_64)
        for position in range(first_position, first_position + positions)
    ]
    return np.array(keys, dtype=np.uint64).view(np.int32).reshape(positions, 2)


def block_numbers(device: torch.device) -> int:
    """Return how many numbers to work on at a time."""
    return _BLOCK_NUMBERS if device.type == "cpu" else _BLOCK_NUMBERS_ELSEWHERE


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _inverse(factor: int) -> int:
    """Return what undoes a multiplication with the odd `factor` modulo 2**32, as an int32."""
    return _as_int32(pow(factor, -1, 1 << 32))


def _xor_shift_(value: torch.Tensor, shift: int, scratch: torch.Tensor) -> None:
    """In place: value ^= value >> shift, the shift being logical; torch shifts int32 arithmetically."""
    torch.bitwise_right_shift(value, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    value.bitwise_xor_(scratch)


# Multipliers of the hash, in the order of their use.
_SPREAD, _FIRST, _SECOND, _THIRD, _LAST = 0x9E3779B9, 0x7FEB352D, 0x846CA68B, 0x21F0AAAD, 0x735A2D97


def hash_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return int32 hash bits, shape of `keys[..., :1]` broadcast with `token_ids`.

    `keys` int32 [rows, 2], `token_ids` int32 [ids] or [rows, ids]. Two keyed rounds of a 32-bit finaliser with full
    avalanche (constants of C. Wellons' search, "lowbias32"); integers only, so every device agrees.
    """
    value = token_ids * _as_int32(_SPREAD) + keys[:, :1]
    scratch = torch.empty_like(value)
    _xor_shift_(value, 16, scratch)
    value.mul_(_FIRST)
    _xor_shift_(value, 15, scratch)
    value.mul_(_as_int32(_SECOND))
    value.bitwise_xor_(keys[:, 1:])
    _xor_shift_(value, 16, scratch)
    value.mul_(_THIRD)
    _xor_shift_(value, 15, scratch)
    value.mul_(_LAST)
    _xor_shift_(value, 15, scratch)
    return value


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32, of the shape of `hash_bits(keys, token_ids)`.

    From 31 bits h: w = (h + 1/2) / 2**31 in (0, 1), E = -log(1 - w) exponential, noise = -log E. Winners have small
    E, where float32 still tells all values of w apart; the clamp keeps E finite for the largest.
    """
    uniform = hash_bits(keys, token_ids).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    uniform.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


# --- bounds and outliers, for looking at few tokens ------------------------------------------------------------

# All that is computed about noise in float32 is this close to the truth, with room to spare.
NOISE_SLACK = 0.01
# The hash's values below this, of 31 bits, are listed; a vocabulary of 152,000 has 0.3 of them in the mean.
_RARE_BITS = 4096
_RARE_GROUP = 64


def _noise_of_bits(bits: int) -> float:
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


LARGEST_NOISE = _noise_of_bits(0)
"""No noise is larger than this, 22.2."""
LARGEST_COMMON_NOISE = _noise_of_bits(_RARE_BITS)
"""No noise of ids that `rare_ids` does not return is larger than this, 13.2."""


def bits_bound(noise: torch.Tensor) -> torch.Tensor:
    """Return int32: hash bits (the lower 31) that are larger than this have less noise than `noise` float32."""
    bound = -torch.expm1(-torch.exp(-(noise - NOISE_SLACK))) * 2.0**31
    # Towards its smallest values the noise in float32 is coarser than the slack.
    everything = torch.tensor((1 << 31) - 1, dtype=torch.int32, device=noise.device)
    return torch.where(noise < -2, everything, bound.clamp(max=2.0**30 * 1.999).to(torch.int32))


def rare_ids(keys: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 rows and int64 ids, [n] each, of all noise above LARGEST_COMMON_NOISE (and some close to it).

    `keys` int32 [rows, 2]; ids are 0 to `vocabulary` - 1. Every step of the hash can be undone, so that the few hash
    values with the largest noise are followed back to their ids, most of which lie outside the vocabulary: a
    twentieth of the work of hashing 152,000 ids.
    """
    values = _rare_values(keys.device)
    rows, ids = [], []
    step = max(1, block_numbers(keys.device) // len(values))
    for first in range(0, len(keys), step):
        block = keys[first : first + step]
        value = values ^ block[:, 1:]
        scratch = torch.empty_like(value)
        _undo_(value, scratch, _SECOND, 15, 30)
        _undo_(value, scratch, _FIRST, 16)
        # With the sign flipped, ids from 0 on are the smallest of all.
        value.sub_(block[:, :1]).mul_(_inverse(_SPREAD)).bitwise_xor_(_INT32_MIN)
        groups, bound = value.view(len(block), -1, _RARE_GROUP), vocabulary + _INT32_MIN
        row, group = (groups.amin(dim=-1) < bound).nonzero(as_tuple=True)
        found = groups[row, group]
        hit, lane = (found < bound).nonzero(as_tuple=True)
        rows.append(row[hit] + first)
        ids.append(found[hit, lane].to(torch.int64) - _INT32_MIN)
    return torch.cat(rows), torch.cat(ids)


@lru_cache
def _rare_values(device: torch.device) -> torch.Tensor:
    """Return int32 [n]: the rare hash values, followed back to where the second half of the key came in."""
    small = torch.arange(_RARE_BITS, dtype=torch.int32, device=device)
    value = torch.cat([small, small + _INT32_MIN])
    scratch = torch.empty_like(value)
    _xor_shift_(value, 15, scratch)
    _xor_shift_(value, 30, scratch)
    _undo_(value, scratch, _LAST, 15, 30)
    _undo_(value, scratch, _THIRD, 16)
    return value


def _undo_(value: torch.Tensor, scratch: torch.Tensor, factor: int, *shifts: int) -> None:
    """In place: undo a multiplication with `factor`, then the xor-shift before it.

    An xor-shift by 16 bits is its own inverse, one by 15 is undone by one of 15 and one of 30.
    """
    value.mul_(_inverse(factor))
    for shift in shifts:
        _xor_shift_(value, shift, scratch)
