"""One step of a model as plain numbers: what is read, where it is cached, and which logits are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.decoding.trees import node_depths
from workers.engine.block_pool import PADDING_BLOCK
from workers.messages import TokenIds

Int32Array = npt.NDArray[np.int32]
_HEADER_INTS = 5
_NO_INTS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepInput:
    """New tokens of one sequence.

    `token_ids` int32 [n], n >= 1, go to positions `first_position` to `first_position` + n - 1; what was cached from
    `first_position` on is forgotten first. Logits are returned for the last `logit_rows` (0 to n) of them.

    `parents` int32 [m] says that the last m tokens are the nodes of a tree below the token before them, as in
    `Proposal`. A node sees that token, all before it, its ancestors and itself. Its position is by depth; but nodes are
    cached in the order they come, at the places that a chain would have.
    """

    sequence_id: int
    first_position: int
    token_ids: TokenIds
    logit_rows: int
    parents: TokenIds | None = None


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """What to keep of a tree that begins at `first_position`: `nodes` int32 [a], ascending indices of its nodes."""

    sequence_id: int
    first_position: int
    nodes: Int32Array


@dataclass(frozen=True, slots=True)
class KVMoves:
    """KV entries to copy from slots `sources` to slots `targets`, int32 [n]; all are read before any is written."""

    sources: Int32Array
    targets: Int32Array

    def to_array(self) -> Int32Array:
        """Return the moves as one int32 array, for a broadcast."""
        return np.concatenate([self.sources, self.targets])

    @classmethod
    def from_array(cls, array: Int32Array) -> "KVMoves":
        """Read back what `to_array` wrote."""
        sources, targets = array.reshape(2, -1)
        return cls(sources, targets)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All sequences of a step laid end to end: everything that any rank needs to run the same forward pass.

    N tokens of B sequences, W blocks in the longest table, R rows of logits, M nodes of trees; all arrays are int32.
    Sequences are ordered by their number of new tokens, then by context, so that sequences that can share an attention
    call are neighbours; `logit_rows` undoes that order.
    """

    token_ids: Int32Array  # [N]
    positions: Int32Array  # [N]
    new_tokens: Int32Array  # [B]
    context_lengths: Int32Array  # [B], after the step
    block_tables: Int32Array  # [B, W], padded with block 0
    logit_rows: Int32Array  # [R], rows of the packed tokens in the order of the inputs
    tree_nodes: Int32Array = field(default_factory=lambda: _NO_INTS)  # [B], of each sequence; [0] if M is 0
    parents: Int32Array = field(default_factory=lambda: _NO_INTS)  # [M], indices within the own sequence's tree

    def places(self) -> Int32Array:
        """Return where in its sequence's cache each token goes, int32 [N]: its position, but for nodes of trees."""
        if not len(self.parents):
            return self.positions
        ends = np.cumsum(self.new_tokens, dtype=np.int32)
        return np.arange(ends[-1], dtype=np.int32) + np.repeat(self.context_lengths - ends, self.new_tokens)

    def to_array(self) -> Int32Array:
        """Return the step as one int32 array, for a broadcast."""
        width = self.block_tables.shape[1]
        header = np.array(
            [len(self.token_ids), len(self.new_tokens), width, len(self.logit_rows), len(self.parents)], dtype=np.int32
        )
        parts = (
            header,
            self.token_ids,
            self.positions,
            self.new_tokens,
            self.context_lengths,
            self.block_tables.ravel(),
            self.logit_rows,
            self.tree_nodes,
            self.parents,
        )
        return np.concatenate(parts)

    @classmethod
    def from_array(cls, array: Int32Array) -> "PackedStep":
        """Read back what `to_array` wrote.

        Raises ValueError when the array has another length than its header says.
        """
        tokens, sequences, width, rows, nodes = (int(value) for value in array[:_HEADER_INTS])
        sizes = [tokens, tokens, sequences, sequences, sequences * width, rows, sequences if nodes else 0, nodes]
        if len(array) != _HEADER_INTS + sum(sizes):
            raise ValueError(f"a packed step of {_HEADER_INTS + sum(sizes)} numbers came as {len(array)}")
        parts = np.split(array[_HEADER_INTS:], np.cumsum(sizes)[:-1])
        parts[4] = parts[4].reshape(sequences, width)
        return cls(*parts)


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
    tree_nodes, parents = _pack_trees([inputs[index].parents for index in order])
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(shifts, new_tokens)
    if len(parents):
        positions = _by_depth(positions, ends, tree_nodes, parents)
    return PackedStep(
        token_ids=np.concatenate([inputs[index].token_ids for index in order]).astype(np.int32, copy=False),
        positions=positions,
        new_tokens=new_tokens,
        context_lengths=first_positions + new_tokens,
        block_tables=tables,
        logit_rows=np.concatenate(rows_of),
        tree_nodes=tree_nodes,
        parents=parents,
    )


def _pack_trees(trees: Sequence[TokenIds | None]) -> tuple[Int32Array, Int32Array]:
    """Return the nodes of each sequence and all their parents; nothing at all where there is no tree."""
    if not any(parents is not None and len(parents) for parents in trees):
        return _NO_INTS, _NO_INTS
    laid_out = [_NO_INTS if parents is None else parents.astype(np.int32, copy=False) for parents in trees]
    return np.array([len(parents) for parents in laid_out], dtype=np.int32), np.concatenate(laid_out)


def _by_depth(positions: Int32Array, ends: Int32Array, tree_nodes: Int32Array, parents: Int32Array) -> Int32Array:
    """Return `positions` with those of tree nodes counted from the top of their tree; a sequence ends at its `ends`."""
    positions = positions.copy()
    node_ends = np.cumsum(tree_nodes)
    for end, nodes, node_end in zip(ends.tolist(), tree_nodes.tolist(), node_ends.tolist(), strict=True):
        if nodes:
            first = end - nodes
            positions[first:end] = positions[first] + node_depths(parents[node_end - nodes : node_end])
    return positions
