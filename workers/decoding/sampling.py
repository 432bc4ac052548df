"""The target's own draw: argmax of warped log-probabilities plus the noise of the position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.decoding.logit_edits import LogitEdits, RuledRun
from workers.decoding.logit_rules import RuleContext
from workers.decoding.noise import Stream, noise_keys
from workers.decoding.race import Race
from workers.decoding.scores import ChunkedLogits, ChunkedScores
from workers.decoding.warping import cutoffs, temperature_scores
from workers.messages import SamplingParams

INVALID_TOKEN = -1


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Consecutive positions of one sequence whose tokens are to be drawn; `context` is set where there are rules."""

    sampling: SamplingParams
    first_position: int
    positions: int
    context: RuleContext | None = None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of every row of a batch: tensors [rows], `keys` int32 [rows, 2], and edits of some rows."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    keys: torch.Tensor
    min_p: torch.Tensor
    edits: LogitEdits | None = None

    @classmethod
    def of_runs(
        cls, runs: Sequence[PositionRun], device: torch.device | str = "cpu", stream: Stream = Stream.DRAW
    ) -> "SamplingRows":
        """Lay `runs` end to end, one row per position; the keys are those of `stream`."""
        counts = [run.positions for run in runs]
        keys = [
            noise_keys(run.sampling.seed, run.sampling.choice, run.first_position, run.positions, stream)
            for run in runs
            if run.positions
        ]
        return cls(
            temperature=torch.tensor(
                np.repeat([run.sampling.temperature for run in runs], counts), dtype=torch.float32, device=device
            ),
            top_k=torch.tensor(
                np.repeat([run.sampling.top_k for run in runs], counts), dtype=torch.int64, device=device
            ),
            top_p=torch.tensor(
                np.repeat([run.sampling.top_p for run in runs], counts), dtype=torch.float32, device=device
            ),
            keys=torch.from_numpy(np.concatenate(keys)).to(device) if keys else torch.empty(0, 2, dtype=torch.int32),
            min_p=torch.tensor(
                np.repeat([run.sampling.min_p for run in runs], counts), dtype=torch.float32, device=device
            ),
            edits=_edits(runs, device),
        )

    def select(self, rows: torch.Tensor) -> "SamplingRows":
        """Return the rows at the indices `rows` int64 [n], without edits."""
        return SamplingRows(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.keys[rows], self.min_p[rows]
        )


def _edits(runs: Sequence[PositionRun], device: torch.device | str) -> LogitEdits | None:
    ruled, first_row = [], 0
    for run in runs:
        if run.context is not None and run.positions:
            positions = range(run.first_position, run.first_position + run.positions)
            ruled.append(RuledRun(first_row, positions, run.context))
        first_row += run.positions
    return LogitEdits.of_runs(ruled, device) if ruled else None


@torch.inference_mode()
def draw_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return int64 [rows]: each row's exact sample of its warped distribution, or its argmax at temperature 0.

    `logits` float32 [rows, V] over real token ids only; they are afterwards what they were. A row with NaN or +inf, or
    whose rules leave nothing, gives INVALID_TOKEN, and touches no other row. The draw depends on the row's logits,
    rules and key alone.
    """
    if rows.edits is None:
        return _draw(logits, rows)
    with rows.edits.applied_to(logits):
        return _draw(logits, rows)


@torch.inference_mode()
def warped_scores(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the logarithm of each row's warped distribution up to a constant, float32 [rows, V].

    `logits` are as in `draw_tokens`. The largest score of a row is 0, what cannot be drawn has -inf; at temperature 0
    only the argmax has more. A row that `draw_tokens` answers with INVALID_TOKEN is NaN throughout.
    """
    if rows.edits is None:
        return _warp(logits, rows)
    with rows.edits.applied_to(logits):
        return _warp(logits, rows)


def _warp(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if not logits.numel():
        return logits.clone()
    chunked = ChunkedLogits.of(logits)
    valid, sampled = _kinds(chunked, rows)
    scores = torch.full_like(logits, -torch.inf).scatter_(-1, chunked.argmax().unsqueeze(-1), 0.0)
    if len(sampled):
        chosen = ChunkedScores.of(chunked, sampled, rows.temperature[sampled])
        dense = temperature_scores(logits[sampled], rows.temperature[sampled])
        scores[sampled] = dense.masked_fill_(dense < _cutoffs(chosen, rows, sampled).unsqueeze(-1), -torch.inf)
    return scores.masked_fill_(~valid.unsqueeze(-1), torch.nan)


def _draw(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if not logits.numel():
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    chunked = ChunkedLogits.of(logits)
    valid, sampled = _kinds(chunked, rows)
    tokens = chunked.argmax()
    if len(sampled):
        chosen = ChunkedScores.of(chunked, sampled, rows.temperature[sampled])
        tokens[sampled] = Race(chosen, _cutoffs(chosen, rows, sampled), rows.keys[sampled]).winners()
    return tokens.masked_fill_(~valid, INVALID_TOKEN)


def _kinds(logits: ChunkedLogits, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [rows], which rows are finite, and int64 [n], which of these are not greedy."""
    valid = logits.maxima.amax(dim=-1).isfinite()
    return valid, ((rows.temperature > 0) & valid).nonzero(as_tuple=True)[0]


def _cutoffs(scores: ChunkedScores, rows: SamplingRows, sampled: torch.Tensor) -> torch.Tensor:
    return cutoffs(scores, rows.min_p[sampled], rows.top_k[sampled], rows.top_p[sampled])
