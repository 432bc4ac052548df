"""Which sequences may be what ends a worker: those in its steps when it failed, until they get past that. Pure."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.errors import LinkError

MOST_SHARED_STRIKES = 2
"""Workers fail mostly for reasons of their own. So often a sequence goes on in company; after that it runs alone.

One strike more, alone, and it is taken for the cause.
"""
MOST_BARREN_TARGETS = 4


@dataclass(slots=True)
class Suspicion:
    """What is held against one sequence, at its targets or at its drafters.

    A strike: a worker failed while the sequence was in a step of it. `reach` is how far these steps would have read it,
    in tokens: a sequence that a worker has read that far is no longer suspected of anything.
    """

    strikes: int = 0
    reach: int = 0

    @property
    def is_isolated(self) -> bool:
        """Whether the sequence may only be in steps that it has to itself, and no other step be under way then."""
        return self.strikes >= MOST_SHARED_STRIKES

    @property
    def is_proven(self) -> bool:
        """Whether worker after worker has failed over the sequence, the last one over it alone."""
        return self.strikes > MOST_SHARED_STRIKES

    def strike(self, reach: int, alone: bool) -> None:
        """Note that a worker failed; `alone`: no other sequence was in its steps. In company nothing is ever proven."""
        self.reach = max(self.reach, reach)
        if alone or not self.is_isolated:
            self.strikes += 1

    def read(self, tokens: int) -> None:
        """Note that a worker has read the sequence up to `tokens` tokens, and lives."""
        if self.strikes and tokens >= self.reach and not self.is_proven:
            self.strikes = self.reach = 0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A sequence in a step, and how many of its tokens will have been read with it, drafts included."""

    suspicion: Suspicion
    reach: int


@dataclass(eq=False, frozen=True, slots=True)
class Step:
    """A message that a worker is sent, with all whose tokens it reads for it."""

    suspects: tuple[Suspect, ...]

    def clear(self) -> None:
        """Clear those whom the step has read as far as ever a failing one would have."""
        for suspect in self.suspects:
            suspect.suspicion.read(suspect.reach)


@dataclass(slots=True)
class StepsUnderWay:
    """The steps that one worker was sent and has not answered; `outlived` counts those that it has."""

    outlived: int = 0
    _steps: set[Step] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def is_isolating(self) -> bool:
        """Whether a sequence is under way that has to be alone."""
        return any(suspect.suspicion.is_isolated for step in self._steps for suspect in step.suspects)

    @contextmanager
    def step(self, suspects: Iterable[Suspect]) -> Iterator[Step]:
        """Note a step that is called within. One whose call fails stays: who drops the worker will `blame` it."""
        step = Step(tuple(suspects))
        self._steps.add(step)
        try:
            yield step
            self.outlived += 1
        except LinkError:
            raise
        except BaseException:
            self._steps.discard(step)
            raise
        self._steps.discard(step)

    def blame(self) -> None:
        """Strike all that are under way: the worker failed, and any of them may have been the cause."""
        reaches: dict[int, Suspect] = {}
        for suspect in (suspect for step in self._steps for suspect in step.suspects):
            known = reaches.get(id(suspect.suspicion), suspect)
            reaches[id(suspect.suspicion)] = max(known, suspect, key=lambda each: each.reach)
        for suspect in reaches.values():
            suspect.suspicion.strike(suspect.reach, alone=len(reaches) == 1)
        self._steps.clear()


@dataclass(slots=True)
class BarrenTargets:
    """How many targets in a row failed without having answered a single step."""

    in_a_row: int = 0

    @property
    def are_to_blame(self) -> bool:
        """Whether by now it must be the targets themselves: hardly ever are so many requests at fault at a time."""
        return self.in_a_row >= MOST_BARREN_TARGETS

    def failed(self, outlived: int) -> None:
        """Note that a target failed that had answered `outlived` steps."""
        self.in_a_row = 0 if outlived else self.in_a_row + 1
