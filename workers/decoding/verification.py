"""Coupled verification: follow the proposal for as long as it guesses the target's own draws."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from workers.decoding.trees import check_tree
from workers.messages import Proposal, TokenIds


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    """Outcome of one verification: `accepted` drafts, and `token_ids` int32 [accepted + 1] to commit."""

    accepted: int
    token_ids: TokenIds

    @property
    def rows(self) -> TokenIds:
        """Which of the draws are committed, int32 [accepted + 1]."""
        return np.arange(self.accepted + 1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """Outcome of one verification: `nodes` int32 [accepted] are the accepted path, from the top, ascending.

    `token_ids` int32 [accepted + 1] are to be committed: those of the path, and the draw behind it.
    """

    nodes: TokenIds
    token_ids: TokenIds

    @property
    def accepted(self) -> int:
        """How many drafts were accepted."""
        return len(self.nodes)

    @property
    def rows(self) -> TokenIds:
        """Which of the draws are committed, int32 [accepted + 1]."""
        return np.append(np.int32(0), self.nodes + 1)


VerifiedProposal: TypeAlias = VerifiedChain | VerifiedTree


def verify_chain(drawn: TokenIds, drafts: TokenIds) -> VerifiedChain:
    """Return the longest prefix of `drafts` that equals the target's draws, and the draw that follows it.

    `drawn` int32 [k + 1]: the target's tokens at the k + 1 positions of the chain, computed with the drafts before
    each position as history; `drafts` int32 [k]. A draw behind a mismatch has a wrong history and is not looked at.
    """
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"a chain of {len(drafts)} drafts needs {len(drafts) + 1} draws, got {len(drawn)}")
    mismatches = np.flatnonzero(drawn[:-1] != drafts)
    accepted = int(mismatches[0]) if len(mismatches) else len(drafts)
    return VerifiedChain(accepted, drawn[: accepted + 1])


def verify_tree(drawn: TokenIds, drafts: TokenIds, parents: TokenIds) -> VerifiedTree:
    """Walk down from the last committed token, each time to the child that equals the target's draw.

    `drawn` int32 [k + 1]: the draw behind the last committed token, then the one behind each node, computed with the
    path to it as history; `drafts` and `parents` int32 [k] are those of `Proposal`. A chain is the tree whose parents
    are -1, 0, 1, ... Raises ValueError for draws or parents that do not belong to such a tree.
    """
    if len(drawn) != len(drafts) + 1:
        raise ValueError(f"a tree of {len(drafts)} drafts needs {len(drafts) + 1} draws, got {len(drawn)}")
    check_tree(drafts, parents)
    draws, path, last = drawn.tolist(), [], -1
    # Children come after their parents and siblings differ, so one pass in order meets every step of the walk.
    for node, (draft, parent) in enumerate(zip(drafts.tolist(), parents.tolist(), strict=True)):
        if parent == last and draft == draws[last + 1]:
            path.append(node)
            last = node
    nodes = np.array(path, dtype=np.int32)
    return VerifiedTree(nodes, drawn[np.append(0, nodes + 1)])


def verify_coupled(drawn: TokenIds, proposal: Proposal) -> VerifiedProposal:
    """Verify a proposal of either shape; see `verify_chain` and `verify_tree`."""
    if proposal.parents is None:
        return verify_chain(drawn, proposal.token_ids)
    return verify_tree(drawn, proposal.token_ids, proposal.parents)
