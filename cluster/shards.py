"""How targets and drafters are dealt out to several routers, each of which schedules only what it owns."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharding:
    """So many routers; `fixed_targets` is the number of targets that does not scale, None where it does."""

    routers: int = 1
    fixed_targets: int | None = None

    def targets(self, replicas: int) -> tuple[int, ...]:
        """Return each router's share of the targets; they differ by one at most."""
        return dealt(replicas, [1] * self.routers)

    def drafters(self, replicas: int, targets: int) -> tuple[int, ...]:
        """Return each router's share of the drafters of one name, in proportion to its share of `targets`."""
        owned = self.targets(self.fixed_targets or targets)
        return dealt(replicas, owned if any(owned) else [1] * self.routers)


def dealt(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return `count` dealt out in proportion to `weights`, which are not negative and not all 0.

    By highest averages (Webster; Sainte-Laguë): one more to deal out takes nothing away from anybody, so a pool that
    grows or shrinks by one replica changes by that one alone.
    """
    shares = [0] * len(weights)
    for _ in range(count):
        shares[max(range(len(weights)), key=lambda index: weights[index] / (2 * shares[index] + 1))] += 1
    return tuple(shares)
