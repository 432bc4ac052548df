"""How many tokens to draft for a sequence: policies behind one small protocol."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DraftLengthContext:
    """What a policy may look at: the request's own limit (None: none), and the deployment's."""

    requested_limit: int | None
    deployment_limit: int


class DraftLengthPolicy(Protocol):
    """Chooses k for one sequence and round; 0 is plain decoding."""

    def __call__(self, context: DraftLengthContext) -> int:
        """Return k, between 0 and the smaller of the limits."""
        ...


def fixed_draft_length(context: DraftLengthContext) -> int:
    """Always draft as much as the deployment and the request allow."""
    if context.requested_limit is None:
        return context.deployment_limit
    return min(context.requested_limit, context.deployment_limit)
