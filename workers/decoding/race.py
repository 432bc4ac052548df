"""The race for a draw: the argmax of score plus noise, found without looking at most of the vocabulary.

A token wins if its noise makes up for its score. Noise is at most 22.2, and all but a token or so of a vocabulary
have at most 13.2 (`noise.rare_ids` lists the others), so chunks whose largest score is too small are out of the race.
In the others the noise's integers, cheaper than the noise, tell which few can hold the winner. Nothing is
approximated: what wins is the argmax of the sums in float32 over the whole row, the first if several are equal.
"""

from dataclasses import dataclass

import torch

from workers.decoding.noise import (
    LARGEST_COMMON_NOISE,
    LARGEST_NOISE,
    NOISE_SLACK,
    bits_bound,
    block_numbers,
    gumbel_noise,
    hash_bits,
    rare_ids,
)
from workers.decoding.scores import ChunkedScores

# The winner is most often in one of these many chunks with the largest scores; if not, it must beat what is there.
_LEADING_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class _Finalists:
    """Tokens that may win: `rows` and `ids` int64 [n] and their `sums` of score and noise, float32 [n]."""

    rows: torch.Tensor
    ids: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Who won: `tokens` int64 [rows] with `sums` of score and noise, float32 [rows].

    Who else ran in front: the tokens of the chunks `leading` int64 [rows, n] have `leading_sums` float32
    [rows, n, width]. The winner is not always one of them.
    """

    tokens: torch.Tensor
    sums: torch.Tensor
    leading: torch.Tensor
    leading_sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class Race:
    """One draw per row of `scores`: tokens whose score is at least `cutoffs` float32 [rows]; `keys` int32 [rows, 2].

    Cutoffs are at most 0, so that the largest score takes part, and -inf for all tokens.
    """

    scores: ChunkedScores
    cutoffs: torch.Tensor
    keys: torch.Tensor

    def run(self) -> "RaceResult":
        """Find the winners. A row's winner does not depend on the other rows."""
        maxima = self.scores.maxima
        leading = maxima.topk(min(_LEADING_CHUNKS, maxima.shape[1])).indices
        rows = torch.arange(len(maxima), device=maxima.device).repeat_interleave(leading.shape[1])
        sums = self._chunk_sums(rows, leading.flatten())
        finalists = [self._best_of(rows, leading.flatten(), sums)]
        reached = finalists[0].sums.view(leading.shape).amax(dim=-1, keepdim=True)
        # The noise that a chunk's best token would need to win, and every other token of it no less.
        needed = (reached - NOISE_SLACK - maxima).scatter_(-1, leading, torch.inf)
        needed.masked_fill_(maxima < self.cutoffs.unsqueeze(-1), torch.inf)
        finalists += self._common(needed)
        finalists += self._rare(needed)
        tokens, best = _first_best(finalists, len(maxima))
        return RaceResult(tokens, best, leading, sums.view(*leading.shape, -1))

    def _common(self, needed: torch.Tensor) -> list[_Finalists]:
        """Return the best of the chunks that can win with common noise; `needed` float32 [rows, chunks]."""
        rows, chunks = (needed <= LARGEST_COMMON_NOISE).nonzero(as_tuple=True)
        if not len(rows):
            return []
        bounds = bits_bound(needed[rows, chunks])
        step = max(1, block_numbers(rows.device) // self.scores.source.width)
        able = torch.cat(
            [
                (hash_bits(self.keys[row], self._ids(chunk)) & 0x7FFFFFFF).amin(dim=-1) <= bound
                for row, chunk, bound in zip(*(torch.split(each, step) for each in (rows, chunks, bounds)), strict=True)
            ]
        )
        return [self._best_of(rows[able], chunks[able], self._chunk_sums(rows[able], chunks[able]))]

    def _rare(self, needed: torch.Tensor) -> list[_Finalists]:
        """Return the tokens with more than common noise in the rows where only that can win for some chunk."""
        concerned = ((needed > LARGEST_COMMON_NOISE) & (needed <= LARGEST_NOISE)).any(dim=-1).nonzero().squeeze(-1)
        if not len(concerned):
            return []
        rows, ids = rare_ids(self.keys[concerned], self.scores.source.vocabulary)
        rows = concerned[rows]
        sums = self._sums(rows, self.scores.at_ids(rows, ids), ids.to(torch.int32).unsqueeze(-1))
        return [_Finalists(rows, ids, sums.squeeze(-1))]

    def _chunk_sums(self, rows: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """Return score plus noise of whole chunks, [n, width], by `rows` and `chunks` int64 [n]."""
        return self._sums(rows, self.scores.at(rows, chunks), self._ids(chunks))

    def _best_of(self, rows: torch.Tensor, chunks: torch.Tensor, sums: torch.Tensor) -> _Finalists:
        """Return the best token of every chunk, by `rows`, `chunks` int64 [n] and `sums` [n, width]."""
        best, lanes = sums.max(dim=-1)
        return _Finalists(rows, self.scores.source.starts(chunks) + lanes, best)

    def _sums(self, rows: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return score plus noise, -inf below the cutoff; `scores` float32 and `ids` int32 [n, m], `rows` [n]."""
        sums = scores + gumbel_noise(self.keys[rows], ids)
        return sums.masked_fill_(scores < self.cutoffs[rows].unsqueeze(-1), -torch.inf)

    def _ids(self, chunks: torch.Tensor) -> torch.Tensor:
        lanes = torch.arange(self.scores.source.width, dtype=torch.int32, device=chunks.device)
        return self.scores.source.starts(chunks).to(torch.int32).unsqueeze(-1) + lanes


def _first_best(finalists: list[_Finalists], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the finalist of each row with the largest sum, the smallest id among equals: int64 [rows], and the sum."""
    row = torch.cat([each.rows for each in finalists])
    ids = torch.cat([each.ids for each in finalists])
    sums = torch.cat([each.sums for each in finalists])
    best = sums.new_full((rows,), -torch.inf).scatter_reduce_(0, row, sums, "amax")
    won = sums == best[row]
    nobody = torch.iinfo(torch.int64).max
    return ids.new_full((rows,), nobody).scatter_reduce_(0, row[won], ids[won], "amin"), best
