"""The target's own draw: argmax of warped log-probabilities plus the noise of the position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.decoding.logit_edits import LogitEdits, RuledRun
from workers.decoding.logit_rules import RuleContext
from workers.decoding.noise import Stream, gumbel_noise, noise_keys
from workers.decoding.race import Race
from workers.decoding.runners_up import Contenders, Draws, greedy_contenders, race_contenders
from workers.decoding.scores import ChunkedLogits, ChunkedScores
from workers.decoding.warping import cutoffs, temperature_scores, whole_row_cutoffs
from workers.messages import SamplingParams

INVALID_TOKEN = -1
# With no more ids than this, looking at all costs less than finding out which can matter.
_SMALL_VOCABULARY = 8192


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
    return draw_with_runners_up(logits, rows, 0).tokens


@torch.inference_mode()
def draw_with_runners_up(logits: torch.Tensor, rows: SamplingRows, count: int) -> Draws:
    """Return what `draw_tokens` does, with `count` runners-up of each row; `logits` are as there."""
    if rows.edits is None:
        return _draw(logits, rows, count)
    with rows.edits.applied_to(logits):
        return _draw(logits, rows, count)


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
    best, tokens = logits.max(dim=-1)
    valid, sampled = _kinds(best, rows)
    scores = torch.full_like(logits, -torch.inf).scatter_(-1, tokens.unsqueeze(-1), 0.0)
    if len(sampled):
        scores[sampled] = _whole_row_scores(logits[sampled], rows.select(sampled))
    return scores.masked_fill_(~valid.unsqueeze(-1), torch.nan)


def _draw(logits: torch.Tensor, rows: SamplingRows, count: int) -> Draws:
    draw = _draw_whole_rows if logits.shape[1] <= _SMALL_VOCABULARY else _draw_sparingly
    return draw(logits, rows, count)


def _draw_whole_rows(logits: torch.Tensor, rows: SamplingRows, count: int) -> Draws:
    best, tokens = logits.max(dim=-1)
    valid, sampled = _kinds(best, rows)
    draws = Draws.of(tokens)
    if count and len(sampled) < len(logits):
        draws.place_(None, Contenders(best, logits), rows.temperature, count)
    if len(sampled):
        chosen = rows.select(sampled)
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        sums = _whole_row_scores(logits[sampled], chosen).add_(gumbel_noise(chosen.keys, ids))
        best, tokens[sampled] = sums.max(dim=-1)
        if count:
            draws.place_(sampled, Contenders(best, sums), chosen.temperature, count)
    tokens.masked_fill_(~valid, INVALID_TOKEN)
    return draws


def _draw_sparingly(logits: torch.Tensor, rows: SamplingRows, count: int) -> Draws:
    if not len(logits):
        return Draws.of(torch.empty(0, dtype=torch.int64, device=logits.device))
    chunked = ChunkedLogits.of(logits)
    best = chunked.maxima.amax(dim=-1)
    valid, sampled = _kinds(best, rows)
    tokens = chunked.argmax()
    draws = Draws.of(tokens)
    if count and len(sampled) < len(logits):
        draws.place_(None, greedy_contenders(chunked, best, count), rows.temperature, count)
    if len(sampled):
        chosen = rows.select(sampled)
        scores = ChunkedScores.of(chunked, sampled, chosen.temperature)
        lowest = cutoffs(scores, chosen.min_p, chosen.top_k, chosen.top_p)
        race = Race(scores, lowest, chosen.keys).run()
        tokens[sampled] = race.tokens
        if count:
            draws.place_(sampled, race_contenders(chunked, race), chosen.temperature, count)
    tokens.masked_fill_(~valid, INVALID_TOKEN)
    return draws


def _kinds(best: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [rows], which rows are finite, and int64 [n], which of these are not greedy."""
    valid = best.isfinite()
    return valid, ((rows.temperature > 0) & valid).nonzero(as_tuple=True)[0]


def _whole_row_scores(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the warped scores of `logits` [rows, V], finite rows all of whose temperatures are above 0."""
    scores = temperature_scores(logits, rows.temperature)
    lowest = whole_row_cutoffs(scores, rows.min_p, rows.top_k, rows.top_p)
    return scores.masked_fill_(scores < lowest.unsqueeze(-1), -torch.inf)
