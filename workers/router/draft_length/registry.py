"""Which draft length policies there are. A new one is one new module and one line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from workers.router.draft_length.acceptance_window import AcceptanceWindowPolicy
from workers.router.draft_length.base import DraftLengthPolicy
from workers.router.draft_length.confidence import LEAST_CONFIDENCE, ConfidencePolicy
from workers.router.draft_length.fixed import FixedPolicy
from workers.router.draft_length.goodput import SWITCH_GAIN, GoodputPolicy
from workers.router.draft_length.probing import PROBE_EVERY

DraftLengthName = Literal["fixed", "acceptance_window", "confidence", "goodput"]


@dataclass(frozen=True, slots=True)
class DraftLengthOptions:
    """What can be set: groups of all policies but goodput, which chooses its own; the others by their policy."""

    fixed_groups: int = 1
    least_confidence: float = LEAST_CONFIDENCE
    switch_gain: float = SWITCH_GAIN
    probe_every: int = PROBE_EVERY

    def __post_init__(self) -> None:
        """Raise ValueError if `fixed_groups` is not positive."""
        if self.fixed_groups < 1:
            raise ValueError(f"fixed_groups must be at least 1, not {self.fixed_groups}")


_BUILDERS: dict[DraftLengthName, Callable[[DraftLengthOptions], DraftLengthPolicy]] = {
    "fixed": lambda options: FixedPolicy(options.fixed_groups),
    "acceptance_window": lambda options: AcceptanceWindowPolicy(options.fixed_groups),
    "confidence": lambda options: ConfidencePolicy(options.least_confidence, options.fixed_groups),
    "goodput": lambda options: GoodputPolicy(options.switch_gain, options.probe_every),
}


def draft_length_policy(
    name: DraftLengthName = "goodput", options: DraftLengthOptions | None = None
) -> DraftLengthPolicy:
    """Return a new policy for one lane. Raises ValueError for an unknown name."""
    builder = _BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"draft_length must be one of {', '.join(_BUILDERS)}, not {name}")
    return builder(options or DraftLengthOptions())
