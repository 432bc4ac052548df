"""Verification by ratio: a draft is kept with probability min(1, p / q), or replaced by what p has more of than q.

Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1, and Chen et
al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2. Here q is sparse: the
drafter cuts its distribution to the likeliest tokens, renormalises, and only then draws from it, so that the few
numbers it sends are the very distribution that its draft came from.

Three streams of random numbers take part, independent of each other: the drafter's draws, the uniform numbers that
decide on acceptance, and the target's draws of corrections and bonus tokens. The tokens are an exact sample of the
target's distribution; unlike under coupled verification, which sample it is depends on the drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.decoding.noise import Stream, gumbel_noise, hash_bits, noise_keys
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, warped_scores
from workers.decoding.verification import VerifiedChain
from workers.messages import SparseProbabilities, TokenIds

# How many tokens a row of q has at most.
Q_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SparseDraws:
    """Drafts and where they come from: `tokens` int64 [rows]; `ids` int64 and `q` float32 [rows, m] on the CPU.

    A row whose logits are not finite has INVALID_TOKEN.
    """

    tokens: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    q: npt.NDArray[np.float32]


@torch.inference_mode()
def draw_sparsely(logits: torch.Tensor, rows: SamplingRows) -> SparseDraws:
    """Draw each row's draft from its m = `Q_TOKENS` likeliest tokens after warping.

    `logits` float32 [rows, V], `rows` with the keys of Stream.DRAFT.
    """
    best, ids = warped_scores(logits, rows).topk(min(Q_TOKENS, logits.shape[-1]), dim=-1)
    chosen = (best + gumbel_noise(rows.keys, ids.to(torch.int32))).argmax(dim=-1, keepdim=True)
    tokens = ids.gather(-1, chosen).squeeze(-1).masked_fill(best[:, 0].isnan(), INVALID_TOKEN)
    return SparseDraws(tokens.cpu().numpy(), ids.cpu().numpy(), best.softmax(dim=-1).cpu().numpy())


def uniform_numbers(runs: Sequence[PositionRun]) -> list[npt.NDArray[np.float64]]:
    """Return float64 [positions] in [0, 1) for each run: what decides on the acceptance of drafts there."""
    keys = [
        noise_keys(run.sampling.seed, run.sampling.choice, run.first_position, run.positions, Stream.ACCEPT)
        for run in runs
    ]
    bits = hash_bits(torch.from_numpy(np.concatenate(keys)), torch.zeros(1, dtype=torch.int32)).squeeze(-1).numpy()
    return np.split((bits & 0x7FFFFFFF) / 2.0**31, np.cumsum([run.positions for run in runs])[:-1])


@dataclass(frozen=True, slots=True)
class RatioChain:
    """A chain to verify: `drafts` int32 [k], each drawn from its row of `q`, and `uniforms` float64 [k]."""

    drafts: TokenIds
    q: SparseProbabilities
    uniforms: npt.NDArray[np.float64]

    def q_of_drafts(self) -> npt.NDArray[np.float64]:
        """Return float64 [k]: the probability that each draft had."""
        matches = self.q.token_ids == self.drafts[:, None]
        drafted: npt.NDArray[np.float64] = np.where(matches, self.q.probabilities.astype(np.float64), 0.0).sum(axis=1)
        return drafted


def accepted_drafts(uniforms: npt.NDArray[np.float64], q: npt.NDArray[np.float64], p: npt.NDArray[np.float64]) -> int:
    """Return how many drafts are kept; all arguments float64 [k], `p` and `q` being the drafts' probabilities.

    A draft is kept if u < p / q. Written so that nothing is divided by 0, and that u = 0 never keeps a draft that the
    target gives no probability. A p that is NaN keeps nothing.
    """
    rejections = np.flatnonzero(~(uniforms * q < p))
    return int(rejections[0]) if len(rejections) else len(p)


@torch.inference_mode()
def verify_by_ratio(logits: torch.Tensor, rows: SamplingRows, chains: Sequence[RatioChain]) -> list[VerifiedChain]:
    """Verify chains of k_i drafts.

    `logits` float32 [sum of k_i + 1, V] of the target at the chains' positions, end to end, `rows` with the keys of
    Stream.DRAW. A row that `draw_tokens` could not draw from ends its chain with INVALID_TOKEN.
    """
    scores = warped_scores(logits, rows)
    normalisers = scores.logsumexp(dim=-1)
    lengths = [len(chain.drafts) for chain in chains]
    starts = np.cumsum([0, *(length + 1 for length in lengths)])[:-1]
    p = _probabilities_of_drafts(scores, normalisers, chains, starts)
    accepted = [
        accepted_drafts(chain.uniforms, chain.q_of_drafts(), part)
        for chain, part in zip(chains, np.split(p, np.cumsum(lengths)[:-1]), strict=True)
    ]
    last_rows = torch.from_numpy(starts + accepted).to(logits.device)
    last_scores = scores[last_rows] - normalisers[last_rows].unsqueeze(-1)
    for index, (chain, kept) in enumerate(zip(chains, accepted, strict=True)):
        if kept < len(chain.drafts):
            last_scores[index] = residual_scores(last_scores[index], chain.q, kept)
    tokens = _draw(last_scores, rows.keys[last_rows])
    return [
        VerifiedChain(kept, np.append(chain.drafts[:kept], token).astype(np.int32))
        for chain, kept, token in zip(chains, accepted, tokens.tolist(), strict=True)
    ]


def residual_scores(scores: torch.Tensor, q: SparseProbabilities, draft: int) -> torch.Tensor:
    """Return the logarithm of (p - q) where that is positive, -inf elsewhere; `scores` if it is so nowhere.

    `scores` float32 [V] is log p; q is the row `draft` of `q`. Not normalised: a constant changes no draw.
    """
    ids = torch.from_numpy(q.token_ids[draft].astype(np.int64)).to(scores.device)
    probabilities = torch.from_numpy(q.probabilities[draft]).to(scores.device)
    residual = scores.exp().index_add_(0, ids, probabilities, alpha=-1).clamp_(min=0).log_()
    # Rounding can reject a draft although p and q are the same.
    return residual if bool(residual.max() > -torch.inf) else scores


def _probabilities_of_drafts(
    scores: torch.Tensor, normalisers: torch.Tensor, chains: Sequence[RatioChain], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return p of all drafts, end to end."""
    indices = [start + np.arange(len(chain.drafts)) for chain, start in zip(chains, starts, strict=True)]
    row = torch.from_numpy(np.concatenate(indices)).to(scores.device)
    token = torch.from_numpy(np.concatenate([chain.drafts for chain in chains]).astype(np.int64)).to(scores.device)
    return (scores[row, token] - normalisers[row]).double().exp().cpu().numpy()


def _draw(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return int64 [rows]: exact samples of the distributions whose logarithms are `scores` [rows, V]."""
    ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    tokens = (scores + gumbel_noise(keys, ids)).argmax(dim=-1)
    return tokens.masked_fill_(scores.isnan().any(dim=-1), INVALID_TOKEN)
