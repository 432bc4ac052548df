"""Chains of drafts while they grow, each token drawn as the target will verify it: coupled, or from a sparse q."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from workers.decoding.noise import Stream
from workers.decoding.ratio import draw_sparsely
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_tokens
from workers.messages import Float32s, Proposal, ProposeItem, SparseProbabilities, TokenIds, Verification, token_ids


@dataclass(slots=True)
class Chain:
    """The drafts of one sequence so far; `q_ids` and `q` are the rows that they were drawn from, for RATIO only."""

    item: ProposeItem
    tokens: list[int] = field(default_factory=list)
    q_ids: list[TokenIds] = field(default_factory=list)
    q: list[Float32s] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        """The position of the next draft."""
        return self.item.first_position + len(self.item.committed) + len(self.tokens)

    @property
    def by_ratio(self) -> bool:
        """Whether the drafts will be verified by ratio."""
        return self.item.verification is Verification.RATIO

    def proposal(self) -> Proposal:
        """Return the chain as the target reads it. Columns of q that are 0 in all rows are left out."""
        tokens = token_ids(self.tokens)
        if not (self.by_ratio and self.tokens):
            return Proposal(tokens)
        ids, q = np.stack(self.q_ids).astype(np.int32), np.stack(self.q)
        # The likeliest come first, so that what filters removed is at the end.
        width = int((q > 0).any(axis=0).sum())
        return Proposal(tokens, q=SparseProbabilities(ids[:, :width], q[:, :width]))


def extend_chains(chains: Sequence[Chain], logits: torch.Tensor, runs: Sequence[PositionRun]) -> list[Chain]:
    """Draw the next token of each chain from its row of `logits` float32 [chains, V].

    Returns the chains that grew; one whose logits are not finite does not.
    """
    extended: list[Chain] = []
    for by_ratio in (False, True):
        rows = [index for index, chain in enumerate(chains) if chain.by_ratio is by_ratio]
        if not rows:
            continue
        extend = _extend_by_ratio if by_ratio else _extend_coupled
        chosen = logits if len(rows) == len(chains) else logits[torch.tensor(rows, device=logits.device)]
        extended += extend([chains[row] for row in rows], chosen, [runs[row] for row in rows])
    return extended


def _extend_coupled(chains: Sequence[Chain], logits: torch.Tensor, runs: Sequence[PositionRun]) -> list[Chain]:
    drawn = draw_tokens(logits, SamplingRows.of_runs(runs, device=logits.device)).tolist()
    for chain, token in zip(chains, drawn, strict=True):
        if token != INVALID_TOKEN:
            chain.tokens.append(token)
    return [chain for chain, token in zip(chains, drawn, strict=True) if token != INVALID_TOKEN]


def _extend_by_ratio(chains: Sequence[Chain], logits: torch.Tensor, runs: Sequence[PositionRun]) -> list[Chain]:
    drawn = draw_sparsely(logits, SamplingRows.of_runs(runs, device=logits.device, stream=Stream.DRAFT))
    extended = []
    for row, chain in enumerate(chains):
        if drawn.tokens[row] != INVALID_TOKEN:
            chain.tokens.append(int(drawn.tokens[row]))
            chain.q_ids.append(drawn.ids[row].astype(np.int32))
            chain.q.append(drawn.q[row])
            extended.append(chain)
    return extended
