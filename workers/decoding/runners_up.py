"""Who came next in a draw: the tokens that were nearly drawn, and what their logits lacked.

A drafter that draws with the target's noise is wrong only where the target's logits differ from its own by more than
its first runner-up lacked; and what the target draws then is most often one of the runners-up.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.decoding.race import RaceResult
from workers.decoding.scores import ChunkedLogits

NOBODY = -1


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
    """The outcome of a draw: `tokens` int64 [rows], and `runners_up` int64 [rows, m], the nearest first.

    `gaps` float32 [rows, m] is by how much the logit of each would have had to be larger for it to be drawn: score and
    noise times temperature. A runner-up that does not exist is NOBODY, infinitely far away. In large vocabularies the
    runners-up are taken from the tokens that were looked at, nearly always the likeliest: now and then one is missed.
    """

    tokens: torch.Tensor
    runners_up: npt.NDArray[np.int64]
    gaps: npt.NDArray[np.float32]

    @classmethod
    def of(cls, tokens: torch.Tensor, count: int) -> "Draws":
        """Begin with `count` runners-up per row that do not exist."""
        shape = (len(tokens), count)
        return cls(tokens, np.full(shape, NOBODY, dtype=np.int64), np.full(shape, np.inf, dtype=np.float32))

    def place_(self, rows: torch.Tensor | None, contenders: Contenders, temperature: torch.Tensor) -> None:
        """Set the runners-up of `rows` int64 [n], None for all; `contenders` and `temperature` float32 [n] are theirs.

        The tokens that won are left out of the contenders.
        """
        count = self.gaps.shape[1]
        found, where = contenders.sums.topk(min(count + 1, contenders.sums.shape[1]), dim=-1)
        ids = (where if contenders.ids is None else contenders.ids.gather(-1, where)).cpu().numpy()
        winners = (self.tokens if rows is None else self.tokens[rows]).cpu().numpy()
        scale = temperature.cpu().numpy()
        # So few numbers are quicker to deal with here than on any device.
        with np.errstate(invalid="ignore"):
            gaps = (contenders.best.cpu().numpy()[:, None] - found.cpu().numpy()) * np.where(scale > 0, scale, 1)[
                :, None
            ]
        gaps[(ids == winners[:, None]) | ~np.isfinite(gaps)] = np.inf
        nearest = gaps.argsort(axis=1, kind="stable")[:, :count]
        gaps = np.take_along_axis(gaps, nearest, 1)
        ids = np.where(np.isfinite(gaps), np.take_along_axis(ids, nearest, 1), NOBODY)
        chosen = slice(None) if rows is None else rows.cpu().numpy()
        self.gaps[chosen, : gaps.shape[1]] = gaps
        self.runners_up[chosen, : gaps.shape[1]] = ids


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
