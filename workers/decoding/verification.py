"""Coupled verification: follow the proposal for as long as it guesses the target's own draws."""

from dataclasses import dataclass

import numpy as np

from workers.messages import TokenIds


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    """Outcome of one verification: `accepted` drafts, and `token_ids` int32 [accepted + 1] to commit."""

    accepted: int
    token_ids: TokenIds


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
