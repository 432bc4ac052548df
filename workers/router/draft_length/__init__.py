from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from workers.router.goodput import RoundTimes
PolicyName = Literal["fixed", "acceptance_window", "confidence", "goodput"]
@dataclass(frozen=True, slots=True)
class DraftCandidate:
    sequence_id: int
    limit: int
    rate: float
    drafted: int
    accepted: int
    verifications: int
@dataclass(frozen=True, slots=True)
class LaneView:
    times: RoundTimes | None
    hidden_ms: float
    max_groups: int
@dataclass(frozen=True, slots=True)
class DraftPlan:
    draft_tokens: Mapping[int, int]
    groups: int = 1
    least_confidence: float = 0.0
class DraftLengthPolicy(Protocol):
    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan: ...
    def forget(self, sequence_id: int) -> None: ...
class Fixed:
    def __init__(self, groups=1): self.groups=groups
    def plan(self, candidates, view):
        return DraftPlan({c.sequence_id: c.limit for c in candidates}, self.groups)
    def forget(self, sequence_id): pass
def build_policy(name): return Fixed()
