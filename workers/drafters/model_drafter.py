"""A smaller language model as drafter: it draws with the target's noise, so that it tends to draw the same tokens."""

import time
from collections.abc import Iterable

from workers.decoding.sampling import INVALID_TOKEN, SamplingRows, draw_tokens
from workers.drafters.base import DrafterLimits
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.engine.step import StepInput
from workers.messages import (
    Proposal,
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

    @property
    def limits(self) -> DrafterLimits:
        """See `Drafter.limits`."""
        engine = self._engine
        return DrafterLimits(engine.vocabulary_size, engine.context_length, engine.block_tokens, engine.total_blocks)

    def propose(self, request: ProposeRequest) -> ProposeResponse:
        """See `Drafter.propose`. A chain ends early where the drafter's context does."""
        began = time.perf_counter()
        fitting = [item for item in request.items if self._fits(item)]
        known = [item for item in fitting if self._followed.accept(item)]
        lost = {item.sequence_id for item in fitting} - {item.sequence_id for item in known}
        chains = self._draft(known) if known else {}
        answers = tuple(
            ProposedItem(
                item.sequence_id,
                item.epoch,
                Proposal(token_ids(chains.get(item.sequence_id, []))),
                lost=item.sequence_id in lost,
            )
            for item in request.items
        )
        return ProposeResponse(answers, compute_ms=(time.perf_counter() - began) * 1e3)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Drafter.release`."""
        self._followed.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """See `Drafter.stats`."""
        return self._followed.stats()

    def _fits(self, item: ProposeItem) -> bool:
        return item.first_position + len(item.committed) <= self._engine.context_length

    def _draft(self, items: list[ProposeItem]) -> dict[int, list[int]]:
        """Return each sequence's chain. The last token of a chain is drawn but not read, so its KV is not there."""
        chains: dict[int, list[int]] = {item.sequence_id: [] for item in items}
        inputs = [
            StepInput(item.sequence_id, item.first_position, item.committed, logit_rows=min(1, item.draft_tokens))
            for item in items
        ]
        drafting = [item for item in items if item.draft_tokens > 0]
        while inputs:
            logits = self._followed.read(inputs)
            if not drafting:
                break
            runs = [
                self._followed.run(item.sequence_id, self._next_position(item, chains), positions=1)
                for item in drafting
            ]
            drawn = draw_tokens(logits, SamplingRows.of_runs(runs, device=logits.device)).tolist()
            for item, token in zip(drafting, drawn, strict=True):
                if token != INVALID_TOKEN:
                    chains[item.sequence_id].append(token)
            drafting = [
                item
                for item, token in zip(drafting, drawn, strict=True)
                if token != INVALID_TOKEN and self._continues(item, chains)
            ]
            inputs = [
                StepInput(
                    item.sequence_id,
                    self._next_position(item, chains) - 1,
                    token_ids(chains[item.sequence_id][-1:]),
                    logit_rows=1,
                )
                for item in drafting
            ]
        return chains

    def _next_position(self, item: ProposeItem, chains: dict[int, list[int]]) -> int:
        return item.first_position + len(item.committed) + len(chains[item.sequence_id])

    def _continues(self, item: ProposeItem, chains: dict[int, list[int]]) -> bool:
        """Whether another token is wanted, and the last one can still be read within the context."""
        return (
            len(chains[item.sequence_id]) < item.draft_tokens
            and self._next_position(item, chains) <= self._engine.context_length
        )
