"""Who came next in a draw: the tokens that were nearly drawn, and what their logits lacked.

A drafter that draws with the target's noise is wrong only where the target's logits differ from its own by more than
its first runner-up lacked; and what the target draws then is most often one of the runners-up.
"""

from dataclasses import dataclass

import torch

from workers.decoding.race import RaceResult
from workers.decoding.scores import ChunkedLogits

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Contenders:
    """Tokens that were looked at in a draw: `best` float32 [rows] of the token that won, `sums` float32 [rows, n].

    Sums are of score and noise, or logits where the draw was greedy. `ids` int64 [rows, n], NOBODY for one to be left
    out; None for all ids in order.
    """

    best: torch.Tensor
    sums: torch.Tensor
    ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """The outcome of a draw: `tokens` int64 [rows], and `runners_up` int64 [rows, m], the nearest first.

    `gaps` float32 [rows, m] is by how much the logit of each would have had to be larger for it to be drawn: score and
    noise times temperature. A runner-up that does not exist is NOBODY, infinitely far away. In large vocabularies the
    runners-up are taken from the tokens that were looked at, nearly always the likeliest: now and then one is missed.
    """

    tokens: torch.Tensor
    runners_up: torch.Tensor
    gaps: torch.Tensor

    @classmethod
    def of(cls, tokens: torch.Tensor, count: int) -> "Draws":
        """Begin with `count` runners-up per row that do not exist."""
        gaps = torch.full((len(tokens), count), torch.inf, device=tokens.device)
        return cls(tokens, torch.full_like(gaps, NOBODY, dtype=torch.int64), gaps)

    def place_(self, rows: torch.Tensor | None, contenders: Contenders, temperature: torch.Tensor) -> None:
        """Set the runners-up of `rows` int64 [n], None for all; `contenders` and `temperature` float32 [n] are theirs.

        The tokens that won are left out of the contenders.
        """
        winners = (self.tokens if rows is None else self.tokens[rows]).unsqueeze(-1)
        if contenders.ids is None:
            sums = contenders.sums.scatter(-1, winners, -torch.inf)
        else:
            left_out = (contenders.ids == winners).logical_or_(contenders.ids == NOBODY)
            sums = contenders.sums.masked_fill(left_out, -torch.inf)
        places = min(self.gaps.shape[1], sums.shape[1])
        found, where = sums.topk(places, dim=-1)
        ids = where if contenders.ids is None else contenders.ids.gather(-1, where)
        scale = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
        gaps = (contenders.best.unsqueeze(-1) - found).mul_(scale)
        ids = ids.masked_fill(~gaps.isfinite(), NOBODY)
        if rows is None:
            self.gaps[:, :places], self.runners_up[:, :places] = gaps, ids
        else:
            self.gaps[rows, :places], self.runners_up[rows, :places] = gaps, ids


def greedy_contenders(chunked: ChunkedLogits, best: torch.Tensor, count: int) -> Contenders:
    """Return the chunks that hold the `count` + 1 largest logits of each row; `best` float32 [rows] are the largest."""
    leading = chunked.maxima.topk(min(count + 1, chunked.maxima.shape[1])).indices
    rows = torch.arange(len(leading), device=leading.device).repeat_interleave(leading.shape[1])
    logits = chunked.at(rows, leading.flatten())
    return Contenders(best, logits.view(len(leading), -1), chunked.ids_once(leading.flatten()).view(len(leading), -1))


def race_contenders(chunked: ChunkedLogits, race: RaceResult) -> Contenders:
    """Return those that ran in front, for some rows of `chunked`."""
    ids = chunked.ids_once(race.leading.flatten()).view(len(race.leading), -1)
    return Contenders(race.sums, race.leading_sums.flatten(1), ids)
