"""A smaller language model as drafter: it draws with the target's noise, so that it tends to draw the same tokens."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from workers.drafters.base import DrafterLimits
from workers.drafters.catching_up import Reading, plan_reading, unread_part
from workers.drafters.chains import Chain, coupled_guesses, extend_chains
from workers.drafters.forecasts import Experience, Forecast, Outcome
from workers.drafters.forks import Fork, Forks
from workers.engine.block_pool import blocks_for
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.engine.step import StepInput
from workers.errors import OutOfBlocksError
from workers.messages import (
    NO_PROPOSAL,
    Branch,
    DraftAheadItem,
    DraftAheadRequest,
    DraftAheadResponse,
    DraftedAheadItem,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    TokenIds,
    Verification,
    WorkerStats,
    token_ids,
)

Result = TypeVar("Result")


class ModelDrafter:
    """Drafts chains, one packed step per draft position for all sequences of a cohort."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followed = FollowedSequences(engine)
        self._experience = Experience()
        self._forecasts: dict[int, Forecast] = {}  # behind what was read last, by sequence id
        self._forks = Forks(self._followed)

    @property
    def limits(self) -> DrafterLimits:
        """See `Drafter.limits`."""
        engine = self._engine
        return DrafterLimits(engine.vocabulary_size, engine.context_length, engine.block_tokens, engine.total_blocks)

    def propose(self, request: ProposeRequest) -> ProposeResponse:
        """See `Drafter.propose`. A chain ends early where the drafter's context does."""
        began = time.perf_counter()
        fitting = [item for item in request.items if self._fits(item)]
        known = [followed for item in fitting if (followed := self._follow(item)) is not None]
        lost = {item.sequence_id for item in fitting} - {item.sequence_id for item in known}
        items = [item for item in known if len(item.committed)]
        chains = self._with_room(lambda: self._draft(items))
        for chain in chains.values():
            self._share(chain)
            self._forecasts[chain.item.sequence_id] = chain.forecast()
        # Of these more is cached than was sent, and there is nothing to draft after yet.
        cached = {item.sequence_id: item.first_position for item in known if not len(item.committed)}
        answers = tuple(
            ProposedItem(
                item.sequence_id,
                item.epoch,
                chains[item.sequence_id].proposal() if item.sequence_id in chains else NO_PROPOSAL,
                lost=item.sequence_id in lost,
                cached_tokens=cached.get(item.sequence_id),
            )
            for item in request.items
        )
        return ProposeResponse(answers, compute_ms=(time.perf_counter() - began) * 1e3)

    def draft_ahead(self, request: DraftAheadRequest) -> DraftAheadResponse:
        """See `Drafter.draft_ahead`.

        Where the drafter's context ends or its blocks run out, it reads less than it was sent: a message that builds on
        that is answered with `lost`. Sequences verified by ratio are read and get no branches.
        """
        began = time.perf_counter()
        known = {item.sequence_id: item for item in request.items if self._knows(item)}
        context = self._engine.context_length
        fitting = [item for item in known.values() if item.first_position + len(item.committed) <= context]
        readings = [self._plan_reading(item) for item in fitting]
        try:
            self._with_room(lambda: self._expect(readings))
            branches = self._branch(readings)
        except OutOfBlocksError:
            branches = {}
        answers = tuple(
            DraftedAheadItem(
                item.sequence_id,
                item.epoch,
                tuple(branches.get(item.sequence_id, ())),
                lost=item.sequence_id not in known,
            )
            for item in request.items
        )
        return DraftAheadResponse(answers, compute_ms=(time.perf_counter() - began) * 1e3)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Drafter.release`."""
        released = None if sequence_ids is None else list(sequence_ids)
        self._forks.drop(released)
        for sequence_id in list(self._forecasts) if released is None else released:
            self._forecasts.pop(sequence_id, None)
        self._followed.release(released)

    def stats(self) -> WorkerStats:
        """See `Drafter.stats`."""
        return self._followed.stats()

    def _fits(self, item: ProposeItem) -> bool:
        return item.first_position + len(item.committed) <= self._engine.context_length

    def _follow(self, item: ProposeItem) -> ProposeItem | None:
        """Learn what came of the last drafts; see `FollowedSequences.accept`."""
        if item.sampling is not None:
            self._forecasts.pop(item.sequence_id, None)
            self._forks.drop((item.sequence_id,))
            return self._followed.accept(item)
        adopted = self._resolve(item.sequence_id, item.first_position, item.committed)
        self._forecasts.pop(item.sequence_id, None)
        accepted = self._followed.accept(item)
        if accepted is None or not adopted:
            return accepted
        return unread_part(self._followed, accepted)

    def _resolve(self, sequence_id: int, first_position: int, committed: TokenIds) -> bool:
        """Learn from what was committed; return whether a branch was drafted for it. Then the sequence is that branch.

        What is expected of it now stays in `_forecasts`.
        """
        forecast = self._forecasts.get(sequence_id)
        if forecast is not None:
            self._experience.learn(forecast, first_position, committed)
        adopted = self._forks.resolve(sequence_id, first_position, committed)
        if adopted is not None:
            self._experience.learn(adopted, first_position, committed)
            self._forecasts[sequence_id] = adopted
        return adopted is not None

    def _with_room(self, work: Callable[[], Result]) -> Result:
        """Do `work`, if need be with the blocks of all forks. Raises OutOfBlocksError when even these do not do."""
        try:
            return work()
        except OutOfBlocksError:
            if not self._forks.drop():
                raise
            return work()

    def _draft(self, items: list[ProposeItem]) -> dict[int, Chain]:
        """Return each sequence's chain. The last token of a chain is drawn but not read, so its KV is not there."""
        chains = {item.sequence_id: Chain(item) for item in items}
        with_row = [item for item in items if item.draft_tokens > 0 or self._fills_a_block(item)]
        asked = {item.sequence_id for item in with_row}
        inputs = [
            StepInput(item.sequence_id, item.first_position, item.committed, logit_rows=int(item.sequence_id in asked))
            for item in items
        ]
        drafting = [chain for chain in chains.values() if chain.item.draft_tokens > 0]
        while inputs:
            logits = self._followed.read(inputs)
            if len(logits) > len(drafting):
                logits = self._share_reads(with_row, logits)
            if not drafting:
                break
            runs = [self._followed.run(chain.item.sequence_id, chain.next_position, positions=1) for chain in drafting]
            drawn = extend_chains(drafting, logits, runs, self._experience)
            drafting = [chain for chain in drawn if self._continues(chain)]
            inputs = [
                StepInput(chain.item.sequence_id, chain.next_position - 1, token_ids(chain.tokens[-1:]), logit_rows=1)
                for chain in drafting
            ]
        return chains

    def _fills_a_block(self, item: ProposeItem) -> bool:
        return self._engine.prefix_caching and len(item.committed) >= self._engine.block_tokens

    def _share_reads(self, items: list[ProposeItem], logits: torch.Tensor) -> torch.Tensor:
        """Let later sequences begin with what was only read, if it is sound; return the rows to draft from.

        The row behind the last token that was read tells, as it builds on all of them. `logits` [items, vocabulary].
        """
        only_read = [index for index, item in enumerate(items) if item.draft_tokens == 0]
        sound = torch.isfinite(logits[only_read]).all(dim=1).tolist()
        for index, is_sound in zip(only_read, sound, strict=True):
            item = items[index]
            if is_sound:
                self._followed.publish(item.sequence_id, item.first_position + len(item.committed))
            else:
                self._followed.withdraw(item.sequence_id)
        return logits[[index for index, item in enumerate(items) if item.draft_tokens > 0]]

    def _share(self, chain: Chain) -> None:
        """Let later sequences begin with what was read of the commits, unless nothing could be drawn behind them."""
        if chain.tokens:
            self._followed.publish(chain.item.sequence_id, chain.base)
        elif chain.item.draft_tokens > 0:
            self._followed.withdraw(chain.item.sequence_id)

    def _continues(self, chain: Chain) -> bool:
        """Whether another token is wanted, and the last one can still be read within the context."""
        wanted = len(chain.tokens) < chain.item.draft_tokens and chain.is_likely
        return wanted and chain.next_position <= self._engine.context_length

    # --- drafting ahead --------------------------------------------------------------------------------------

    def _knows(self, item: DraftAheadItem) -> bool:
        if self._followed.has_read(item.sequence_id, item.first_position):
            return True
        self._forks.drop((item.sequence_id,))
        return False

    def _plan_reading(self, item: DraftAheadItem) -> Reading:
        """Follow the commits of `item`; see `plan_reading`."""
        self._resolve(item.sequence_id, item.first_position, item.committed)
        known = self._forecasts.pop(item.sequence_id, None)
        return plan_reading(self._followed, item, known, self._engine.context_length)

    def _expect(self, readings: list[Reading]) -> None:
        """Read what is missing, and draw what is expected behind all drafts."""
        steps = [reading.step for reading in readings if reading.step is not None]
        logits = self._followed.read(steps)
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
        for reading in readings:
            self._forecasts[reading.item.sequence_id] = reading.forecast
            # Where branches come true one after the other, nothing is proposed for a long time.
            if reading.forecast.guesses:
                self._followed.publish(reading.item.sequence_id, reading.forecast.base)

    def _branch(self, readings: list[Reading]) -> dict[int, list[Branch]]:
        """Draft behind the likeliest outcomes of each sequence, all in one batch; return the branches by sequence."""
        forks: dict[int, Fork] = {}
        owners: dict[int, Reading] = {}
        try:
            for reading, outcome in self._affordable(readings):
                fork = self._forks.grow(reading.item.sequence_id, reading.forecast.base, outcome)
                forks[fork.fork_id], owners[fork.fork_id] = fork, reading
            chains = self._draft(
                [
                    ProposeItem(
                        fork.fork_id,
                        reading.item.epoch,
                        fork.position,
                        token_ids([fork.outcome.token]),
                        reading.item.draft_tokens,
                    )
                    for fork, reading in zip(forks.values(), owners.values(), strict=True)
                ]
            )
        except BaseException:
            self._forks.drop([reading.item.sequence_id for reading in readings])
            raise
        branches: dict[int, list[Branch]] = {}
        for fork_id, chain in chains.items():
            if chain.tokens:
                fork, outcome = forks[fork_id], forks[fork_id].outcome
                fork.forecast = chain.forecast()
                branch = Branch(outcome.accepted, outcome.token, chain.proposal(), outcome.probability)
                branches.setdefault(owners[fork_id].item.sequence_id, []).append(branch)
        return branches

    def _affordable(self, readings: list[Reading]) -> list[tuple[Reading, Outcome]]:
        """Return the outcomes to draft behind, likeliest first: those that context and free blocks have room for."""
        listed = [
            (reading, outcome)
            for reading in readings
            if reading.forecast.verification is Verification.COUPLED and reading.item.draft_tokens > 0
            for outcome in self._experience.likeliest_outcomes(reading.forecast, reading.item.branches)
        ]
        listed.sort(key=lambda each: -each[1].probability)
        chosen, free = [], self._engine.free_blocks
        size, context = self._engine.block_tokens, self._engine.context_length
        for reading, outcome in listed:
            position = reading.forecast.base + outcome.accepted
            # The block that it begins in is copied.
            needed = blocks_for(min(position + reading.item.draft_tokens, context), size) - position // size
            if position < context and needed <= free:
                chosen.append((reading, outcome))
                free -= needed
        return chosen
