"""How much a drafter can draft ahead while a verification runs. Pure."""

from dataclasses import dataclass

from workers.router.step_times import StepTimeFit

MOST_BRANCHES = 4
"""Per sequence: more outcomes hardly ever come to pass."""
TOLERANCE = 1.15
"""By so much longer than the verification drafting ahead may take: a hit then still saves nearly all of it."""


@dataclass(frozen=True, slots=True)
class AheadBudget:
    """Outcomes to draft for of each sequence, and drafts behind each of them."""

    branches: int
    draft_tokens: int


def ahead_budget(sequences: int, draft_tokens: int, verify_ms: float, draft: StepTimeFit) -> AheadBudget | None:
    """Return what fits into the verification; None if that is not even one draft of one outcome each.

    Drafting k tokens ahead takes k + 1 steps: the drafter first reads the last of the drafts that are verified. Drafts
    come before branches: a hit on few of them would make the next round a short one.
    """
    available_ms = verify_ms * TOLERANCE
    for depth in range(draft_tokens, 0, -1):
        for branches in range(MOST_BRANCHES, 0, -1):
            if draft.time_ms(sequences) + depth * draft.time_ms(sequences * branches) <= available_ms:
                return AheadBudget(branches, depth)
    return None
