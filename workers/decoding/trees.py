"""The shape of a tree of drafts, given by its parents: int32 [k], each node's parent, or -1 below the last commit.

Parents come before their children, so that one pass in order is enough for everything here.
"""

import itertools

import numpy as np
import numpy.typing as npt

from workers.messages import Proposal, TokenIds

Bools = npt.NDArray[np.bool_]


def check_parents(parents: TokenIds) -> None:
    """Raise ValueError unless each of `parents` int32 [k] is -1 or the index of an earlier node."""
    if parents.ndim != 1 or parents.dtype.kind != "i":
        raise ValueError(f"parents are whole numbers in one row, not {parents.dtype} of shape {parents.shape}")
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
    if len(wrong):
        raise ValueError(f"node {wrong[0]} has parent {parents[wrong[0]]}; it must be -1 or an earlier node")


def check_tree(drafts: TokenIds, parents: TokenIds) -> None:
    """Raise ValueError unless `parents` int32 [k] make a tree of `drafts` int32 [k] in which siblings differ.

    Two equal siblings would be one guess with two continuations of which a walk finds only one.
    """
    check_parents(parents)
    if len(parents) != len(drafts):
        raise ValueError(f"a tree of {len(drafts)} drafts has {len(parents)} parents")
    children: set[tuple[int, int]] = set()
    for child in zip(parents.tolist(), drafts.tolist(), strict=True):
        if child in children:
            raise ValueError(f"node {child[0]} has two children with token {child[1]}")
        children.add(child)


def node_depths(parents: TokenIds) -> TokenIds:
    """Return each node's depth, int32 [k]: 0 for children of the last committed token."""
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return np.array(depths, dtype=np.int32)


def proposal_depth(proposal: Proposal) -> int:
    """Return the length of the longest path of `proposal`: how many of its drafts can be accepted at most."""
    if proposal.parents is None or not len(proposal):
        return len(proposal)
    return int(node_depths(proposal.parents).max()) + 1


def ancestry(parents: TokenIds) -> Bools:
    """Return bool [k, k]: whether the node of a row is, or descends from, the node of a column."""
    descends = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            descends[node] |= descends[parent]
    return descends


def straight_runs(parents: TokenIds) -> list[range]:
    """Cut the rows of a tree's draws, 0 behind the last commit and 1 + i behind node i, where a path does not go on.

    Each row of a run is the parent of the next one. A chain is one run; a tree of paths laid out one after the other
    has as many as it has leaves.
    """
    starts = [0, *(np.flatnonzero(parents != np.arange(-1, len(parents) - 1)) + 1).tolist(), len(parents) + 1]
    return [range(start, end) for start, end in itertools.pairwise(starts)]
