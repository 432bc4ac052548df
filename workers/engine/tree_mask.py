"""Who sees whom in a tree of tokens that are cached one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.decoding.trees import ancestry
from workers.engine.step import PackedStep


@dataclass(frozen=True, slots=True)
class TreeMask:
    """What a group of B sequences, n queries each, needs beside positions when some of its tokens are tree nodes.

    Outside its tree a query sees the keys up to its own place in `ends`. `cells` are the node-ancestor pairs (a node
    is one of its own), as indices into the group's [B, n, keys]; `distances` are how many positions lie between.
    """

    ends: torch.Tensor  # int64 [B, n]
    cells: torch.Tensor  # int64 [C]
    distances: torch.Tensor  # int64 [C]

    def add_to_(self, seen: torch.Tensor, window: int | None) -> None:
        """Let nodes see their ancestors in `seen` bool [B, n, keys], those within `window` positions if it is given."""
        if window is None:
            seen.view(-1).index_fill_(0, self.cells, True)
        else:
            seen.view(-1).index_copy_(0, self.cells, self.distances < window)


Ints = npt.NDArray[np.integer]


def tree_arrays(step: PackedStep, first: int, end: int, positions: Ints, key_slots: int) -> tuple[Ints, ...]:
    """Return `ends`, `cells` and `distances` of the group of sequences `first` to `end` - 1, whose B x n queries are at
    `positions`; nothing where none of them has a tree.
    """
    if not step.tree_nodes[first:end].any():
        return ()
    ends = positions.copy()
    cells: list[Ints] = []
    distances: list[Ints] = []
    node_ends = np.cumsum(step.tree_nodes)
    queries = positions.shape[1]
    for row, sequence in enumerate(range(first, end)):
        nodes = int(step.tree_nodes[sequence])
        top = int(step.context_lengths[sequence]) - nodes  # the place of the first node
        # Padding repeats the last query; its copies see what it sees, so that no row is masked altogether.
        first_query = int(step.new_tokens[sequence]) - nodes
        node_of = np.minimum(np.arange(queries - first_query), nodes - 1) if nodes else np.arange(0)
        ends[row, queries - len(node_of) :] = top - 1
        sees = ancestry(step.parents[node_ends[sequence] - nodes : node_ends[sequence]])
        depths = sees.sum(axis=1)
        query, ancestor = np.nonzero(sees[node_of])
        cells.append((row * queries + first_query + query) * key_slots + top + ancestor)
        distances.append(depths[node_of[query]] - depths[ancestor])
    return ends, np.concatenate(cells), np.concatenate(distances)


def tree_mask(parts: Sequence[torch.Tensor], shape: tuple[int, int]) -> TreeMask | None:
    """Return the mask from what `tree_arrays` gave, now on the device; `shape` is [B, n]."""
    if not parts:
        return None
    ends, cells, distances = parts
    return TreeMask(ends.view(shape), cells, distances)
