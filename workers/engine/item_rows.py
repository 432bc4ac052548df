"""Where the logits of each item of a verification step are, among the rows of the whole step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.step import StepInput
from workers.messages import VerifyItem


@dataclass(frozen=True, slots=True)
class ItemRows:
    """The rows of one item: `first` to `first` + `rows` - 1."""

    item: VerifyItem
    first: int

    @property
    def rows(self) -> int:
        """Scored tokens stand behind the first of the tokens that are read, so that all of these need logits."""
        item = self.item
        return len(item.committed) + len(item.proposal) if len(item.scored) else self.draws

    @property
    def draws(self) -> int:
        """The target draws behind the last committed token and behind each draft."""
        return len(self.item.proposal) + 1 if self.item.sample else 0

    @property
    def first_draw(self) -> int:
        """The row of the first draw; the others follow."""
        return self.first + self.rows - self.draws

    @property
    def next_position(self) -> int:
        """The position of the first token that is drawn."""
        return self.item.first_position + len(self.item.committed)

    def step_input(self) -> StepInput:
        """Return what the engine reads for the item."""
        item = self.item
        read = np.concatenate([item.committed, item.proposal.token_ids])
        return StepInput(
            item.sequence_id, item.first_position, read, logit_rows=self.rows, parents=item.proposal.parents
        )


def lay_out(items: Sequence[VerifyItem]) -> list[ItemRows]:
    """Lay the rows of `items` end to end."""
    parts: list[ItemRows] = []
    first = 0
    for item in items:
        parts.append(ItemRows(item, first))
        first += parts[-1].rows
    return parts


def select_rows(logits: torch.Tensor, rows: Sequence[npt.NDArray[np.integer]]) -> torch.Tensor:
    """Return the `rows` of `logits` [R, V], end to end; `logits` itself where they are all of them, in order."""
    indices = np.concatenate(rows).astype(np.int64)
    if len(indices) == len(logits) and bool((indices == np.arange(len(indices))).all()):
        return logits
    return logits[torch.from_numpy(indices).to(logits.device)]
