"""Drafting ahead: behind the likeliest outcomes of a verification, all branches of a cohort in one batch per step."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.drafters.catching_up import Reading
from workers.drafters.chains import Chain, ChainSteps, coupled_guesses
from workers.drafters.forecasts import Experience, Outcome
from workers.drafters.forks import Fork, Forks
from workers.engine.block_pool import blocks_for
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.errors import OutOfBlocksError
from workers.messages import Branch, ProposeItem, Verification, token_ids


@dataclass(slots=True)
class _Growing:
    """A fork, of whose sequence, and its drafts so far."""

    reading: Reading
    fork: Fork
    chain: Chain


class BranchDrafter:
    """Reads what is missing of commits and drafts, and drafts behind what may come of them.

    Most corrections are known before that: what stood next to a draft when it was drawn. Their branches begin in the
    step that reads the last draft, those behind all drafts in the one after it.
    """

    def __init__(self, engine: Engine, followed: FollowedSequences, experience: Experience, forks: Forks) -> None:
        self._engine = engine
        self._followed = followed
        self._experience = experience
        self._forks = forks
        self._steps = ChainSteps(followed, experience, engine.context_length)

    def draft(self, readings: Sequence[Reading]) -> dict[int, list[Branch]]:
        """Return the branches by sequence, likeliest first; guesses of `readings` are filled in.

        Where blocks run out there are fewer branches, or none. Raises OutOfBlocksError where not even the reading fits.
        """
        try:
            return self._draft(readings)
        except BaseException:
            self._forks.drop([reading.item.sequence_id for reading in readings])
            raise

    def _draft(self, readings: Sequence[Reading]) -> dict[int, list[Branch]]:
        growing = self._grow(readings, early=True)
        try:
            drafting = self._read(readings, growing)
        except OutOfBlocksError:
            # Nobody has to do without their reading for branches.
            self._forks.drop([reading.item.sequence_id for reading in readings])
            growing = []
            drafting = self._read(readings, growing)
        late = self._grow(readings, early=False, taken=growing)
        try:
            self._finish(drafting, [each.chain for each in late])
        except OutOfBlocksError:
            self._forks.drop([reading.item.sequence_id for reading in readings])
            return {}
        return _branches([*growing, *late])

    def _read(self, readings: Sequence[Reading], growing: list[_Growing]) -> list[Chain]:
        """Take the first step: read what is missing, draw what is expected there, and begin the early branches."""
        early = [each.chain for each in growing]
        steps = [reading.step for reading in readings if reading.step is not None]
        inputs = [*steps, *self._steps.first_inputs(early)]
        if not inputs:
            return []
        logits = self._followed.read(inputs)
        self._expect(readings, logits[: len(logits) - len(early)])
        return self._steps.extend(early, logits[len(logits) - len(early) :])

    def _expect(self, readings: Sequence[Reading], logits: torch.Tensor) -> None:
        """Draw the guesses that were missing, from `logits` float32 [missing guesses, V]."""
        drawing = [reading for reading in readings if reading.guesses]
        runs = [
            self._followed.run(
                reading.item.sequence_id, reading.forecast.base + len(reading.forecast.guesses), reading.guesses
            )
            for reading in drawing
        ]
        guesses = iter(coupled_guesses(logits, runs)) if runs else iter(())
        for reading in drawing:
            drawn = list(itertools.islice(guesses, reading.guesses))
            finite = drawn.index(None) if None in drawn else len(drawn)
            reading.forecast.guesses += [guess for guess in drawn[:finite] if guess is not None]

    def _finish(self, drafting: list[Chain], late: list[Chain]) -> None:
        """Begin the late branches beside the early ones that go on, and draft to the end of all."""
        inputs = [*self._steps.next_inputs(drafting), *self._steps.first_inputs(late)]
        drafting = [*drafting, *late]
        while inputs:
            drafting = self._steps.extend(drafting, self._followed.read(inputs))
            inputs = self._steps.next_inputs(drafting)

    def _grow(self, readings: Sequence[Reading], early: bool, taken: Sequence[_Growing] = ()) -> list[_Growing]:
        """Fork each sequence where its likeliest outcomes part from its drafts, without those that are `taken`."""
        grown: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for each in taken:
            grown[each.reading.item.sequence_id].add((each.fork.outcome.accepted, each.fork.outcome.token))
        listed = [
            (reading, outcome)
            for reading in readings
            if reading.forecast.verification is Verification.COUPLED and reading.item.draft_tokens > 0
            for outcome in self._chosen(reading, early, grown[reading.item.sequence_id])
        ]
        growing = []
        for reading, outcome, drafts in self._affordable(listed, early, sum(map(self._blocks_to_come, taken))):
            fork = self._forks.grow(reading.item.sequence_id, reading.forecast.base, outcome)
            item = ProposeItem(fork.fork_id, reading.item.epoch, fork.position, token_ids([fork.outcome.token]), drafts)
            growing.append(_Growing(reading, fork, Chain(item)))
        return growing

    def _chosen(self, reading: Reading, early: bool, grown: set[tuple[int, int]]) -> list[Outcome]:
        most = reading.item.branches
        if early and reading.guesses:
            # All drafts being accepted is often the likeliest outcome: there must be a branch left for it.
            most -= 1
        outcomes = self._experience.likeliest_outcomes(reading.forecast, most)
        return [outcome for outcome in outcomes if (outcome.accepted, outcome.token) not in grown][: most - len(grown)]

    def _affordable(
        self, listed: list[tuple[Reading, Outcome]], early: bool, promised: int
    ) -> Iterator[tuple[Reading, Outcome, int]]:
        """Yield the outcomes to draft behind, likeliest first, and how many drafts: what context and blocks allow.

        Of the free blocks `promised` are for others.
        """
        listed.sort(key=lambda each: -each[1].probability)
        free = self._engine.free_blocks - promised
        size, context = self._engine.block_tokens, self._engine.context_length
        for reading, outcome in listed:
            item, position = reading.item, reading.forecast.base + outcome.accepted
            drafts = item.draft_tokens if item.steps is None else min(item.draft_tokens, item.steps - (not early))
            # The block that it begins in is copied.
            needed = blocks_for(min(position + drafts, context), size) - position // size
            if drafts > 0 and position < context and needed <= free:
                free -= needed
                yield reading, outcome, drafts

    def _blocks_to_come(self, growing: _Growing) -> int:
        """Return how many blocks a branch will still take."""
        size, item = self._engine.block_tokens, growing.chain.item
        end = min(item.first_position + item.draft_tokens, self._engine.context_length)
        read = self._engine.length(item.sequence_id) or 0
        return blocks_for(end, size) - blocks_for(read, size)


def _branches(growing: Sequence[_Growing]) -> dict[int, list[Branch]]:
    branches: dict[int, list[Branch]] = {}
    for each in sorted(growing, key=lambda each: -each.fork.outcome.probability):
        if each.chain.tokens:
            outcome = each.fork.outcome
            each.fork.forecast = each.chain.forecast()
            branch = Branch(outcome.accepted, outcome.token, each.chain.proposal(), outcome.probability)
            branches.setdefault(each.reading.item.sequence_id, []).append(branch)
    return branches
