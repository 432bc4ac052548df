"""Scores of rows of logits, looked at in chunks: the maximum of every chunk says which ones can matter.

One pass over a row yields the maxima. What comes after, filters and draws, then computes scores only where it must.
"""

from dataclasses import dataclass

import numpy as np
import torch

# A multiple of what vector units hold. Larger chunks make fewer maxima, smaller ones fewer scores to look at.
CHUNK_IDS = 64


@dataclass(frozen=True, slots=True)
class ChunkedLogits:
    """Logits float32 [rows, V] and `maxima` float32 [rows, chunks], NaN where there is one in the chunk.

    Chunk c is the ids from `width` * c on; the last one is moved to the left, so that it too is `width` ids wide.
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    width: int

    @classmethod
    def of(cls, logits: torch.Tensor) -> "ChunkedLogits":
        """Find the maxima of `logits`, of which there must be at least one per row."""
        # Chunks are addressed in memory, see `at`.
        logits = logits if logits.stride(-1) == 1 and logits.stride(0) >= logits.shape[1] else logits.contiguous()
        vocabulary = logits.shape[1]
        width = min(CHUNK_IDS, vocabulary)
        whole = vocabulary // width
        maxima = logits[:, : whole * width].view(len(logits), whole, width).amax(dim=-1)
        if whole * width < vocabulary:
            maxima = torch.cat([maxima, logits[:, -width:].amax(dim=-1, keepdim=True)], dim=-1)
        return cls(logits, maxima, width)

    @property
    def vocabulary(self) -> int:
        """The number of ids."""
        return self.logits.shape[1]

    def starts(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return the first id of each of `chunks` int64 [n]."""
        return (chunks * self.width).clamp(max=self.vocabulary - self.width)

    def ids_once(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return the ids of `chunks` int64 [n], [n, width]; -1 for those of the last chunk that the one before has."""
        ids = self.starts(chunks).unsqueeze(-1) + torch.arange(self.width, device=chunks.device)
        if self.vocabulary % self.width:
            ids.masked_fill_(ids < (chunks * self.width).unsqueeze(-1), -1)
        return ids

    def at(self, rows: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """Return the logits of chunks, [n, width], by `rows` and `chunks` int64 [n]."""
        logits = self.logits
        numbers = (logits.shape[0] - 1) * logits.stride(0) + self.vocabulary
        windows = logits.as_strided((numbers - self.width + 1, self.width), (1, 1))
        return windows[rows * logits.stride(0) + self.starts(chunks)]

    def argmax(self) -> torch.Tensor:
        """Return int64 [rows]: each row's first largest id; anything where there is NaN."""
        chunks = self.maxima.argmax(dim=-1)
        rows = torch.arange(len(chunks), device=chunks.device)
        return self.starts(chunks) + self.at(rows, chunks).argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class ChunkedScores:
    """Scores (logit - best) / temperature of some rows of `source`, computed where they are asked for.

    `rows` int64 [n] are the rows' indices in `source`, `best` float32 [n] their largest logits, finite, and
    `temperature` float32 [n], above 0. `maxima` [n, chunks] are the chunks' largest scores; the row's largest is 0.
    """

    source: ChunkedLogits
    rows: torch.Tensor
    best: torch.Tensor
    temperature: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def of(cls, source: ChunkedLogits, rows: torch.Tensor, temperature: torch.Tensor) -> "ChunkedScores":
        """Score the `rows` int64 [n] of `source` at `temperature` float32 [n]."""
        maxima = source.maxima[rows]
        best = maxima.amax(dim=-1)
        temperature = usable_temperature(temperature)
        # Rounding keeps the order, so that the largest logit of a chunk also has the largest score.
        return cls(source, rows, best, temperature, _scored_(maxima, best, temperature))

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, rows: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """Return the scores of chunks, [m, width], by `rows` (indices in this object) and `chunks` int64 [m]."""
        return _scored_(self.source.at(self.rows[rows], chunks), self.best[rows], self.temperature[rows])

    def at_ids(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of single tokens, [m, 1], by `rows` and `ids` int64 [m]."""
        logits = self.source.logits[self.rows[rows], ids].unsqueeze(-1)
        return _scored_(logits, self.best[rows], self.temperature[rows])

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """Return all scores of `rows` int64 [m], [m, V]."""
        return _scored_(self.source.logits.index_select(0, self.rows[rows]), self.best[rows], self.temperature[rows])

    def largest(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` largest scores of `rows` int64 [m], descending, [m, count]; `count` is at most V."""
        chunks, width, vocabulary = self.maxima.shape[1], self.source.width, self.source.vocabulary
        if count >= chunks:
            return descending(self.dense(rows))[:, :count]
        # The largest scores lie in the chunks with the largest maxima.
        leading = self.maxima[rows].topk(count).indices
        scores = self.at(rows.repeat_interleave(count), leading.flatten())
        if vocabulary % width:
            # The last chunk repeats ids of the one before it.
            repeated = (leading == chunks - 1).flatten().unsqueeze(-1) & (
                torch.arange(width, device=rows.device) < width - vocabulary % width
            )
            scores.masked_fill_(repeated, -torch.inf)
        return descending(scores.view(len(rows), -1))[:, :count]


def usable_temperature(temperature: torch.Tensor) -> torch.Tensor:
    """In float32 the smallest temperatures round to 0, and 0 / 0 would make the favourite NaN."""
    return temperature.clamp(min=torch.finfo(torch.float32).tiny)


def _scored_(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """In place. Subtracting the maximum first keeps the smallest temperatures free of overflow."""
    return logits.sub_(best.unsqueeze(-1)).div_(temperature.unsqueeze(-1))


def descending(values: torch.Tensor) -> torch.Tensor:
    """Return `values` [rows, n] sorted, the largest first."""
    if values.device.type == "cpu":
        # numpy sorts float32 with vector instructions, 25 times as fast as torch.
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values
