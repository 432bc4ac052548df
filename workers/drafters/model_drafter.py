"""A smaller language model as drafter: it draws with the target's noise, so that it tends to draw the same tokens."""

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from workers.drafters.base import DrafterLimits
from workers.drafters.branches import BranchDrafter
from workers.drafters.catching_up import Reading, plan_reading, unread_part
from workers.drafters.chains import Chain, ChainSteps
from workers.drafters.forecasts import Experience, Forecast
from workers.drafters.forks import Forks
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
    WorkerStats,
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
        self._steps = ChainSteps(self._followed, self._experience, engine.context_length)
        self._branches = BranchDrafter(engine, self._followed, self._experience, self._forks)

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
        branches: dict[int, list[Branch]] = {}
        with contextlib.suppress(OutOfBlocksError):
            branches = self._with_room(lambda: self._branches.draft(readings))
            self._remember(readings)
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
            drafting = self._steps.extend(drafting, logits)
            inputs = self._steps.next_inputs(drafting)
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

    def _remember(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            self._forecasts[reading.item.sequence_id] = reading.forecast
            # Where branches come true one after the other, nothing is proposed for a long time.
            if reading.forecast.guesses:
                self._followed.publish(reading.item.sequence_id, reading.forecast.base)
