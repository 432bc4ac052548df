"""Rules applied to a batch of logits: sparse edits of the cells concerned, in the order of vLLM.

That order (V1, vllm/v1/sample/sampler.py, `Sampler.forward`): bad words, min_tokens, logit bias, then penalties; then
what follows in warping.py. Bans come last here, which is the same: a banned logit is -inf before and after.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from workers.decoding.logit_rules import Ids, RuleContext


@dataclass(frozen=True, slots=True)
class RuledRun:
    """Consecutive `positions` of one sequence, whose logits are in the batch's rows from `first_row` on."""

    first_row: int
    positions: range
    context: RuleContext


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Edits of a batch of logits. Cells are int64 [2, n]: row and token id.

    `biases` float32 [n] are added to `biased_cells`; `penalised_cells` are divided and lessened by `divisors` and
    `subtrahends` float32 [n], see `Penalties`; `banned_cells` become -inf.
    """

    biased_cells: torch.Tensor
    biases: torch.Tensor
    penalised_cells: torch.Tensor
    divisors: torch.Tensor
    subtrahends: torch.Tensor
    banned_cells: torch.Tensor

    @classmethod
    def of_runs(cls, runs: Sequence[RuledRun], device: torch.device | str = "cpu") -> "LogitEdits":
        """Look up what the rules say of every position of `runs`, none of which is empty."""
        rows = [run.first_row + index for run in runs for index in range(len(run.positions))]
        rules = [run.context.compiled for run in runs for _ in run.positions]
        penalties = [run.context.penalties(run.positions) for run in runs]
        banned = [run.context.banned_ids(position) for run in runs for position in run.positions]
        arrays = (
            _cells(rows, [each.biased_ids for each in rules]),
            np.concatenate([each.biases for each in rules]),
            _cells(rows, [each.ids for each in penalties for _ in each.divisors]),
            np.concatenate([each.divisors.ravel() for each in penalties]),
            np.concatenate([each.subtrahends.ravel() for each in penalties]),
            _cells(rows, banned),
        )
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    @contextmanager
    def applied_to(self, logits: torch.Tensor) -> Iterator[None]:
        """Edit `logits` float32 [rows, V] in place, and put back what was there when the context ends.

        A copy of the rows would cost more than all edits, which touch few of their cells.
        """
        touched = [tuple(cells) for cells in (self.biased_cells, self.penalised_cells, self.banned_cells)]
        before = [logits[cells] for cells in touched]
        try:
            self._apply_(logits)
            yield
        finally:
            for cells, values in zip(touched, before, strict=True):
                logits[cells] = values

    def _apply_(self, logits: torch.Tensor) -> None:
        logits[tuple(self.biased_cells)] += self.biases
        found = logits[tuple(self.penalised_cells)]
        penalised = torch.where(found > 0, found / self.divisors, found * self.divisors) - self.subtrahends
        logits[tuple(self.penalised_cells)] = penalised
        logits[tuple(self.banned_cells)] = -torch.inf


def _cells(rows: Sequence[int], ids: Sequence[Ids]) -> Ids:
    """Return int64 [2, n] from the ids of each row."""
    return np.stack([np.repeat(rows, [len(row_ids) for row_ids in ids]), np.concatenate(ids)])
