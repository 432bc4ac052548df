"""How many tokens to draft for each sequence of a lane: policies behind one small protocol."""

from workers.router.draft_length.base import DraftCandidate, DraftLengthPolicy, DraftPlan, LaneView
from workers.router.draft_length.legacy import DraftLengthContext, fixed_draft_length
from workers.router.draft_length.registry import (
    DraftLengthName,
    DraftLengthOptions,
    draft_length_policy,
    policy_names,
)

__all__ = [
    "DraftCandidate",
    "DraftLengthContext",
    "DraftLengthName",
    "DraftLengthOptions",
    "DraftLengthPolicy",
    "DraftPlan",
    "LaneView",
    "draft_length_policy",
    "fixed_draft_length",
    "policy_names",
]
