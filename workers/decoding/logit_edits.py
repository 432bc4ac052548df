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
    `subtrahends` float32 [n], see `Penalties`; `banned_cells` become -inf. So does, in the
    rows `masked_rows` int64 [m], all that has no bit in `allowed` uint8 [m, (V + 7) // 8].
    """

    biased_cells: torch.Tensor
    biases: torch.Tensor
    penalised_cells: torch.Tensor
    divisors: torch.Tensor
    subtrahends: torch.Tensor
    banned_cells: torch.Tensor
    masked_rows: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def of_runs(cls, runs: Sequence[RuledRun], device: torch.device | str = "cpu") -> "LogitEdits":
        """Look up what the rules say of every position of `runs`, none of which is empty."""
        rows = [run.first_row + index for run in runs for index in range(len(run.positions))]
        rules = [run.context.compiled for run in runs for _ in run.positions]
        penalties = [run.context.penalties(run.positions) for run in runs]
        banned = [run.context.banned_ids(position) for run in runs for position in run.positions]
        allowed = [run.context.allowed(position) for run in runs for position in run.positions]
        masked = [(row, bits) for row, bits in zip(rows, allowed, strict=True) if bits is not None]
        arrays = (
            _cells(rows, [each.biased_ids for each in rules]),
            np.concatenate([each.biases for each in rules]),
            _cells(rows, [each.ids for each in penalties for _ in each.divisors]),
            np.concatenate([each.divisors.ravel() for each in penalties]),
            np.concatenate([each.subtrahends.ravel() for each in penalties]),
            _cells(rows, banned),
            np.array([row for row, _ in masked], dtype=np.int64),
            np.stack([bits for _, bits in masked]) if masked else np.empty((0, 0), dtype=np.uint8),
        )
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    @contextmanager
    def applied_to(self, logits: torch.Tensor) -> Iterator[None]:
        """Edit `logits` float32 [rows, V] in place, and put back what was there when the context ends.

        A copy of the rows would cost more than all edits, which touch few of their cells; masks touch most of them.
        """
        masked_before = logits.index_select(0, self.masked_rows) if len(self.masked_rows) else None
        touched = [tuple(cells) for cells in (self.biased_cells, self.penalised_cells, self.banned_cells)]
        before = [logits[cells] for cells in touched]
        try:
            self._apply_(logits)
            yield
        finally:
            for cells, values in zip(touched, before, strict=True):
                logits[cells] = values
            if masked_before is not None:
                logits.index_copy_(0, self.masked_rows, masked_before)

    def _apply_(self, logits: torch.Tensor) -> None:
        logits[tuple(self.biased_cells)] += self.biases
        found = logits[tuple(self.penalised_cells)]
        penalised = torch.where(found > 0, found / self.divisors, found * self.divisors) - self.subtrahends
        logits[tuple(self.penalised_cells)] = penalised
        logits[tuple(self.banned_cells)] = -torch.inf
        if len(self.masked_rows):
            logits.index_add_(0, self.masked_rows, self._penalties(logits.shape[1]))

    def _penalties(self, width: int) -> torch.Tensor:
        """Return 0 where `allowed` has a bit and -inf elsewhere, float32 [m, width].

        Looking bytes up and adding takes a fifth of the time of unpacking bits and filling by them.
        """
        rows, width_bytes = self.allowed.shape
        by_byte = _PENALTIES_OF_BYTES.to(self.allowed.device).index_select(0, self.allowed.flatten().int())
        return by_byte.view(rows, 8 * width_bytes)[:, :width]


def _penalties_of_bytes() -> torch.Tensor:
    """Return float32 [256, 8]: for each byte, 0 where a bit is set, the lowest first, and -inf elsewhere."""
    is_set = torch.arange(256).unsqueeze(1).bitwise_and(1 << torch.arange(8)).ne(0)
    return torch.full((256, 8), -torch.inf).masked_fill_(is_set, 0.0)


_PENALTIES_OF_BYTES = _penalties_of_bytes()


def _cells(rows: Sequence[int], ids: Sequence[Ids]) -> Ids:
    """Return int64 [2, n] from the ids of each row."""
    return np.stack([np.repeat(rows, [len(row_ids) for row_ids in ids]), np.concatenate(ids)])
