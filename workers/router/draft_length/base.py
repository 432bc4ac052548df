"""What a draft length policy is told of a lane, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.router.goodput import RoundTimes


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """One decoding sequence that may be drafted for.

    `limit` is the most drafts that request, deployment, token budget and context allow; `rate` its observed acceptance
    rate. `drafted` and `accepted` are of its last verification, (0, 0) before the first of `verifications`.
    """

    sequence_id: int
    limit: int
    rate: float
    drafted: int
    accepted: int
    verifications: int


@dataclass(frozen=True, slots=True)
class LaneView:
    """The lane's round times (None until they are known), and into how many groups its sequences may be split.

    `hidden_ms` is the draft time that drafting ahead is expected to hide.
    """

    times: RoundTimes | None
    hidden_ms: float
    max_groups: int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How many tokens to draft by sequence id, for all candidates, and in how many groups they take turns.

    A drafter stops a chain where the probability that all of it is accepted falls under `least_confidence`.
    """

    draft_tokens: Mapping[int, int]
    groups: int = 1
    least_confidence: float = 0.0


class DraftLengthPolicy(Protocol):
    """Chooses the draft lengths of one lane; it may remember its sequences, so every lane has one of its own."""

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """Return draft lengths between 0 and the limit of each candidate; 0 is plain decoding."""
        ...

    def forget(self, sequence_id: int) -> None:
        """Drop what is remembered of a sequence that left the lane, if anything."""
        ...
