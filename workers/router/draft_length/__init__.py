"""How many tokens to draft for each sequence of a lane: policies behind one small protocol."""

from workers.router.draft_length.base import DraftCandidate, DraftLengthPolicy, DraftPlan, LaneView
from workers.router.draft_length.registry import (
    DraftLengthName,
    DraftLengthOptions,
    draft_length_policy,
)

__all__ = [
    "DraftCandidate",
    "DraftLengthName",
    "DraftLengthOptions",
    "DraftLengthPolicy",
    "DraftPlan",
    "LaneView",
    "draft_length_policy",
]
