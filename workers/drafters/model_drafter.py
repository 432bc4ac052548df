"""A smaller language model as drafter: it draws with the target's noise, so that it tends to draw the same tokens."""

import time
from collections.abc import Iterable

from workers.drafters.base import DrafterLimits
from workers.drafters.chains import Chain, extend_chains
from workers.drafters.forecasts import Experience, Forecast
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.engine.step import StepInput
from workers.messages import (
    NO_PROPOSAL,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    WorkerStats,
    token_ids,
)


class ModelDrafter:
    """Drafts chains, one packed step per draft position for all sequences of a cohort."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followed = FollowedSequences(engine)
        self._experience = Experience()
        self._forecasts: dict[int, Forecast] = {}  # of what was drafted last, by sequence id

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
        chains = self._draft([item for item in known if len(item.committed)])
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

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Drafter.release`."""
        released = list(self._forecasts) if sequence_ids is None else list(sequence_ids)
        for sequence_id in released:
            self._forecasts.pop(sequence_id, None)
        self._followed.release(None if sequence_ids is None else released)

    def stats(self) -> WorkerStats:
        """See `Drafter.stats`."""
        return self._followed.stats()

    def _fits(self, item: ProposeItem) -> bool:
        return item.first_position + len(item.committed) <= self._engine.context_length

    def _follow(self, item: ProposeItem) -> ProposeItem | None:
        """Learn from what became of the last drafts; see `FollowedSequences.accept`."""
        forecast = self._forecasts.pop(item.sequence_id, None)
        if forecast is not None and item.sampling is None:
            self._experience.learn(forecast, item.first_position, item.committed)
        return self._followed.accept(item)

    def _draft(self, items: list[ProposeItem]) -> dict[int, Chain]:
        """Return each sequence's chain. The last token of a chain is drawn but not read, so its KV is not there."""
        chains = {item.sequence_id: Chain(item) for item in items}
        inputs = [
            StepInput(item.sequence_id, item.first_position, item.committed, logit_rows=min(1, item.draft_tokens))
            for item in items
        ]
        drafting = [chain for chain in chains.values() if chain.item.draft_tokens > 0]
        while inputs:
            logits = self._followed.read(inputs)
            if not drafting:
                break
            begun = [chain for chain in drafting if not chain.tokens]
            runs = [self._followed.run(chain.item.sequence_id, chain.next_position, positions=1) for chain in drafting]
            drawn = extend_chains(drafting, logits, runs, self._experience)
            for chain in begun:
                self._share(chain)
            drafting = [chain for chain in drawn if self._continues(chain)]
            inputs = [
                StepInput(chain.item.sequence_id, chain.next_position - 1, token_ids(chain.tokens[-1:]), logit_rows=1)
                for chain in drafting
            ]
        self._forecasts |= {sequence_id: chain.forecast() for sequence_id, chain in chains.items()}
        return chains

    def _share(self, chain: Chain) -> None:
        """Let later sequences begin with what was read of the commits, unless nothing could be drawn behind them."""
        if chain.tokens:
            self._followed.publish(chain.item.sequence_id, chain.next_position - len(chain.tokens))
        else:
            self._followed.withdraw(chain.item.sequence_id)

    def _continues(self, chain: Chain) -> bool:
        """Whether another token is wanted, and the last one can still be read within the context."""
        wanted = len(chain.tokens) < chain.item.draft_tokens and chain.is_likely
        return wanted and chain.next_position <= self._engine.context_length
