"""One step of a model as plain numbers: what is read, where it is cached, and which logits are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.block_pool import PADDING_BLOCK
from workers.messages import TokenIds

Int32Array = npt.NDArray[np.int32]
_HEADER_INTS = 4


@dataclass(frozen=True, slots=True)
class StepInput:
    """New tokens of one sequence.

    `token_ids` int32 [n], n >= 1, go to positions `first_position` to `first_position` + n - 1; what was cached from
    `first_position` on is forgotten first. Logits are returned for the last `logit_rows` (0 to n) of them.
    """

    sequence_id: int
    first_position: int
    token_ids: TokenIds
    logit_rows: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All sequences of a step laid end to end: everything that any rank needs to run the same forward pass.

    N tokens of B sequences, W blocks in the longest table, R rows of logits; all arrays are int32. Sequences are
    ordered by their number of new tokens, then by context, so that sequences that can share an attention call are
    neighbours; `logit_rows` undoes that order.
    """

    token_ids: Int32Array  # [N]
    positions: Int32Array  # [N]
    new_tokens: Int32Array  # [B]
    context_lengths: Int32Array  # [B], after the step
    block_tables: Int32Array  # [B, W], padded with block 0
    logit_rows: Int32Array  # [R], rows of the packed tokens in the order of the inputs

    def to_array(self) -> Int32Array:
        """Return the step as one int32 array, for a broadcast."""
        width = self.block_tables.shape[1]
        header = np.array([len(self.token_ids), len(self.new_tokens), width, len(self.logit_rows)], dtype=np.int32)
        parts = (
            header,
            self.token_ids,
            self.positions,
            self.new_tokens,
            self.context_lengths,
            self.block_tables.ravel(),
            self.logit_rows,
        )
        return np.concatenate(parts)

    @classmethod
    def from_array(cls, array: Int32Array) -> "PackedStep":
        """Read back what `to_array` wrote.

        Raises ValueError when the array has another length than its header says.
        """
        tokens, sequences, width, rows = (int(value) for value in array[:_HEADER_INTS])
        sizes = [tokens, tokens, sequences, sequences, sequences * width, rows]
        if len(array) != _HEADER_INTS + sum(sizes):
            raise ValueError(f"a packed step of {_HEADER_INTS + sum(sizes)} numbers came as {len(array)}")
        parts = np.split(array[_HEADER_INTS:], np.cumsum(sizes)[:-1])
        return cls(parts[0], parts[1], parts[2], parts[3], parts[4].reshape(sequences, width), parts[5])


def pack_step(inputs: Sequence[StepInput], block_tables: Sequence[Sequence[int]]) -> PackedStep:
    """Lay the sequences of a step end to end.

    `block_tables[i]` lists the blocks of `inputs[i]`'s sequence, enough for its context after the step.
    """
    counts = [len(item.token_ids) for item in inputs]
    contexts = [item.first_position + count for item, count in zip(inputs, counts, strict=True)]
    order = sorted(range(len(inputs)), key=lambda index: (counts[index], contexts[index]))
    new_tokens = np.array([counts[index] for index in order], dtype=np.int32)
    ends = np.cumsum(new_tokens, dtype=np.int32)
    first_positions = np.array([inputs[index].first_position for index in order], dtype=np.int32)
    shifts = first_positions - (ends - new_tokens)  # position minus packed row, constant within a sequence
    tables = np.full((len(inputs), max(len(table) for table in block_tables)), PADDING_BLOCK, dtype=np.int32)
    rows_of: list[Int32Array] = [ends[:0]] * len(inputs)
    for packed, index in enumerate(order):
        tables[packed, : len(block_tables[index])] = block_tables[index]
        end = int(ends[packed])
        rows_of[index] = np.arange(end - inputs[index].logit_rows, end, dtype=np.int32)
    return PackedStep(
        token_ids=np.concatenate([inputs[index].token_ids for index in order]).astype(np.int32, copy=False),
        positions=np.arange(ends[-1], dtype=np.int32) + np.repeat(shifts, new_tokens),
        new_tokens=new_tokens,
        context_lengths=first_positions + new_tokens,
        block_tables=tables,
        logit_rows=np.concatenate(rows_of),
    )
