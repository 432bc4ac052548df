"""Counter-based Gumbel noise: the same numbers for (seed, choice, position, token id) on every device.

The draw of a token is y = argmax over v of (log p[v] + noise[v]) with independent standard Gumbel noise, an exact
sample of p (Gumbel-max; Maddison, Tarlow and Minka 2014). The noise is a function of integers alone, so that any
process can compute it for any position, and drafts cannot change it.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# Work on this many numbers at a time, so that the int32 and float32 temporaries stay in the L2 cache.
_BLOCK_NUMBERS = 65_536
# Below this share of possible tokens, picking them out is faster than hashing all.
_SPARSE_SHARE = 0.25


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


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _xor_shift_(value: torch.Tensor, shift: int, scratch: torch.Tensor) -> None:
    """In place: value ^= value >> shift, the shift being logical; torch shifts int32 arithmetically."""
    torch.bitwise_right_shift(value, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    value.bitwise_xor_(scratch)


def hash_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return int32 hash bits, shape of `keys[..., :1]` broadcast with `token_ids`.

    `keys` int32 [rows, 2], `token_ids` int32 [ids] or [rows, ids]. Two keyed rounds of a 32-bit finaliser with full
    avalanche (constants of C. Wellons' search, "lowbias32"); integers only, so every device agrees.
    """
    value = token_ids * _as_int32(0x9E3779B9) + keys[:, :1]
    scratch = torch.empty_like(value)
    _xor_shift_(value, 16, scratch)
    value.mul_(_as_int32(0x7FEB352D))
    _xor_shift_(value, 15, scratch)
    value.mul_(_as_int32(0x846CA68B))
    value.bitwise_xor_(keys[:, 1:])
    _xor_shift_(value, 16, scratch)
    value.mul_(_as_int32(0x21F0AAAD))
    _xor_shift_(value, 15, scratch)
    value.mul_(_as_int32(0x735A2D97))
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


def add_gumbel_noise_(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Add noise for token ids 0 to V - 1 to `scores` in place and return it; -inf stays.

    `scores` float32 [rows, V], `keys` int32 [rows, 2]. Where filters left few tokens, only theirs is computed.
    """
    possible = scores > -torch.inf
    if int(possible.sum()) < _SPARSE_SHARE * scores.numel():
        rows, ids = possible.nonzero(as_tuple=True)
        scores[rows, ids] += gumbel_noise(keys[rows], ids.to(torch.int32).unsqueeze(-1)).squeeze(-1)
        return scores
    vocabulary = scores.shape[1]
    block_ids = min(vocabulary, _BLOCK_NUMBERS)
    block_rows = max(1, _BLOCK_NUMBERS // vocabulary)
    for start in range(0, vocabulary, block_ids):
        ids = torch.arange(start, min(start + block_ids, vocabulary), dtype=torch.int32, device=scores.device)
        for row in range(0, scores.shape[0], block_rows):
            scores[row : row + block_rows, start : start + block_ids] += gumbel_noise(keys[row : row + block_rows], ids)
    return scores
