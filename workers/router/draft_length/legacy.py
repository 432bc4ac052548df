"""The draft length of one sequence by itself, for callers that do not plan a whole lane."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftLengthContext:
    """What a policy may look at: the request's own limit (None: none), and the deployment's."""

    requested_limit: int | None
    deployment_limit: int


def fixed_draft_length(context: DraftLengthContext) -> int:
    """Always draft as much as the deployment and the request allow."""
    if context.requested_limit is None:
        return context.deployment_limit
    return min(context.requested_limit, context.deployment_limit)
