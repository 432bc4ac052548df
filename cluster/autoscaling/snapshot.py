"""What an autoscaling policy sees."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.messages import RouterLoad


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """One pool: how many replicas are asked for now, and how many run long enough to show in what is measured.

    `warm` may exceed `wanted` while replicas that are to go still drain.
    """

    wanted: int
    warm: int

    @property
    def usable(self) -> int:
        """Replicas that serve now and will go on to."""
        return min(self.warm, self.wanted)

    @property
    def settled(self) -> bool:
        """Whether all that is asked for is there, and warm, and nothing else is."""
        return self.warm == self.wanted


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """The service at `now_s` of any clock that does not go back. Drafter pools by the name of their drafters."""

    now_s: float
    load: RouterLoad
    targets: ReplicaCounts
    drafters: Mapping[str, ReplicaCounts] = field(default_factory=dict)
    ingress: ReplicaCounts = ReplicaCounts(1, 1)

    @property
    def sequences_per_target(self) -> float:
        """Sequences in service, those that wait included, per warm target."""
        return self.load.streams / max(1, self.targets.usable)
