"""Which sequences are drafted and verified together: those of similar draft length, with as few moves as possible."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCE_TOKENS = 1
"""A sequence stays where it is while its draft length is this close to those its group should have."""


@dataclass(slots=True)
class _Group:
    """A label, how many sequences it is to have, and the shortest and longest draft length it should have."""

    label: int
    size: int
    members: list[int]
    shortest: int = 0
    longest: int = 0
    kept: list[int] = field(default_factory=list)

    def misfit(self, length: int) -> int:
        """How far a draft length lies outside those of the group."""
        return max(self.shortest - length, length - self.longest, 0)


def form_cohorts(lengths: Mapping[int, int], groups: int, current: Mapping[int, int]) -> dict[int, int]:
    """Assign every sequence to a group of nearly equal size, contiguous in draft length.

    A sequence leaves its current group only if its draft length is more than `TOLERANCE_TOKENS` outside what the group
    should have, or if sizes must be evened; the worst fitting go first. Deterministic.

    Args:
        lengths: Draft length by sequence id, for all sequences that take part.
        groups: How many groups; not more are used than there are sequences.
        current: Group by sequence id as it was; ids and groups that no longer exist are ignored.

    Returns:
        A group in 0 … groups − 1 for each id of `lengths`. Sizes differ by at most one.

    Raises:
        ValueError: If `groups` is not positive.
    """
    parts = _empty_groups(lengths, _count(lengths, groups), current)
    in_order = sorted(lengths, key=lambda sequence: (lengths[sequence], sequence))
    begin = 0
    for part in parts:
        block = in_order[begin : begin + part.size]
        part.shortest, part.longest = lengths[block[0]], lengths[block[-1]]
        begin += part.size
        fitting = [each for each in part.members if part.misfit(lengths[each]) <= TOLERANCE_TOKENS]
        part.kept = sorted(fitting, key=lambda each: (part.misfit(lengths[each]), each))[: part.size]
    kept = {sequence for part in parts for sequence in part.kept}
    moving = iter([sequence for sequence in in_order if sequence not in kept])
    for part in parts:
        part.kept += [next(moving) for _ in range(part.size - len(part.kept))]
    return {sequence: part.label for part in parts for sequence in part.kept}


def random_cohorts(lengths: Mapping[int, int], groups: int, seed: int) -> dict[int, int]:
    """Assign sequences to groups of nearly equal size by lot: what `form_cohorts` is measured against.

    Raises:
        ValueError: If `groups` is not positive.
    """
    groups = _count(lengths, groups)
    in_order = sorted(lengths)
    random.Random(seed).shuffle(in_order)
    return {sequence: number % groups for number, sequence in enumerate(in_order)}


def _count(lengths: Mapping[int, int], groups: int) -> int:
    if groups < 1:
        raise ValueError(f"groups must be at least 1, not {groups}")
    return min(groups, len(lengths)) or 1


def _empty_groups(lengths: Mapping[int, int], groups: int, current: Mapping[int, int]) -> list[_Group]:
    """The groups in the order of the draft lengths they have now, and with the sizes that move the fewest sequences."""
    members: list[list[int]] = [[] for _ in range(groups)]
    for sequence in sorted(lengths):
        label = current.get(sequence, -1)
        if 0 <= label < groups:
            members[label].append(sequence)
    size, larger = divmod(len(lengths), groups)
    by_members = sorted(range(groups), key=lambda label: (-len(members[label]), label))
    sizes = {label: size + (number < larger) for number, label in enumerate(by_members)}
    parts = [_Group(label, sizes[label], members[label]) for label in range(groups) if sizes[label]]
    return sorted(parts, key=lambda part: (_middle([lengths[each] for each in part.members]), part.label))


def _middle(lengths: Sequence[int]) -> float:
    """The mean; an empty group may take any place, and takes the last."""
    return sum(lengths) / len(lengths) if lengths else float("inf")
