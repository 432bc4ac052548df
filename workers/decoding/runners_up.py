"""Who came next in a draw: the tokens that were nearly drawn, and what their logits lacked.

A drafter that draws with the target's noise is wrong only where the target's logits differ from its own by more than
its first runner-up lacked; and what the target draws then is most often one of the runners-up.
"""

import math
from dataclasses import dataclass

import torch

from workers.decoding.race import RaceResult
from workers.decoding.scores import ChunkedLogits


@dataclass(frozen=True, slots=True)
class Contenders:
    """Tokens that were looked at in a draw: `best` float32 [rows] of the token that won, `sums` float32 [rows, n].

    Sums are of score and noise, or logits where the draw was greedy. `ids` int64 [rows, n]; None for all ids in order.
    """

    best: torch.Tensor
    sums: torch.Tensor
    ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """The outcome of a draw: `tokens` int64 [rows], and of each row the `runners_up`, the nearest first.

    `gaps` say by how much the logit of each would have had to be larger for it to be drawn: score and noise times
    temperature. In large vocabularies the runners-up are taken from the tokens that were looked at, nearly always the
    likeliest: now and then one is missed.
    """

    tokens: torch.Tensor
    runners_up: list[tuple[int, ...]]
    gaps: list[tuple[float, ...]]

    @classmethod
    def of(cls, tokens: torch.Tensor) -> "Draws":
        """Begin without runners-up."""
        return cls(tokens, [()] * len(tokens), [()] * len(tokens))

    def place_(self, rows: torch.Tensor | None, contenders: Contenders, temperature: torch.Tensor, count: int) -> None:
        """Set at most `count` runners-up of `rows` int64 [n], None for all; `contenders` are theirs.

        `temperature` float32 [n]. The tokens that won are left out of the contenders.
        """
        found, where = contenders.sums.topk(min(count + 1, contenders.sums.shape[1]), dim=-1)
        ids = where if contenders.ids is None else contenders.ids.gather(-1, where)
        winners = self.tokens if rows is None else self.tokens[rows]
        # So few numbers are quickest to deal with one by one.
        parts = [each.tolist() for each in (winners, contenders.best, temperature, ids, found)]
        for row, winner, best, scale, tokens, sums in zip(
            range(len(winners)) if rows is None else rows.tolist(), *parts, strict=True
        ):
            there = [
                (token, (best - value) * (scale or 1.0))
                for token, value in zip(tokens, sums, strict=True)
                if token != winner and math.isfinite(best - value)
            ][:count]
            self.runners_up[row] = tuple(token for token, _ in there)
            self.gaps[row] = tuple(gap for _, gap in there)


def greedy_contenders(chunked: ChunkedLogits, best: torch.Tensor, count: int) -> Contenders:
    """Return the chunks that hold the `count` + 1 largest logits of each row; `best` float32 [rows] are the largest."""
    leading = chunked.maxima.topk(min(count + 1, chunked.maxima.shape[1])).indices
    rows = torch.arange(len(leading), device=leading.device).repeat_interleave(leading.shape[1])
    return _of_chunks(chunked, best, leading, chunked.at(rows, leading.flatten()))


def race_contenders(chunked: ChunkedLogits, race: RaceResult) -> Contenders:
    """Return those that ran in front, for some rows of `chunked`."""
    return _of_chunks(chunked, race.sums, race.leading, race.leading_sums)


def _of_chunks(chunked: ChunkedLogits, best: torch.Tensor, chunks: torch.Tensor, sums: torch.Tensor) -> Contenders:
    """Return the tokens of `chunks` int64 [rows, n]; each counts once, also where the last two chunks overlap."""
    ids, sums = chunked.ids_once(chunks.flatten()).view(len(chunks), -1), sums.reshape(len(chunks), -1)
    return Contenders(best, sums.masked_fill(ids < 0, -torch.inf) if chunked.vocabulary % chunked.width else sums, ids)
