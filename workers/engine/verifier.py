"""The target's side of a round: one packed step over all sequences, one draw per position, one walk per proposal."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from workers.decoding.prompt_lookup import look_up
from workers.decoding.ratio import RatioChain, uniform_numbers, verify_by_ratio
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_tokens
from workers.decoding.verification import VerifiedProposal, verify_coupled
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.engine.item_rows import ItemRows, lay_out, select_rows
from workers.engine.reports import NOT_FINITE, with_reports
from workers.engine.tree_rounds import accepted_paths, runs_of
from workers.messages import (
    Proposal,
    SparseProbabilities,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    WorkerStats,
)

Outcomes = dict[int, VerifiedProposal]
"""What became of each proposal, by sequence id."""


class Verifier:
    """Verifies proposals with a target engine and keeps the KV of exactly what was accepted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followed = FollowedSequences(engine)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Run one step; answers come in the order of the items."""
        began = time.perf_counter()
        live = [accepted for item in request.items if (accepted := self._followed.accept(item)) is not None]
        sent = [item for item in live if len(item.committed)]
        unread = [self._with_drafts(item) for item in sent]
        answered = {answer.sequence_id: answer for answer in self._step(unread)} if unread else {}
        for item, read in zip(sent, unread, strict=True):
            if looked_up := len(read.proposal) - len(item.proposal):
                answered[item.sequence_id] = replace(answered[item.sequence_id], looked_up=looked_up)
        for item in live:
            if not len(item.committed):
                answered[item.sequence_id] = VerifiedItem(
                    item.sequence_id, item.epoch, cached_tokens=item.first_position
                )
            if item.sampling is not None and item.first_position:  # it starts the sequence: the rest was cached
                answered[item.sequence_id] = replace(answered[item.sequence_id], reused_tokens=item.first_position)
        answers = tuple(
            answered.get(item.sequence_id) or VerifiedItem(item.sequence_id, item.epoch, lost=True)
            for item in request.items
        )
        read_tokens = sum(len(item.committed) + len(item.proposal) for item in unread)
        return VerifyResponse(answers, (time.perf_counter() - began) * 1e3, read_tokens)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their KV blocks; unknown ids are ignored."""
        self._followed.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        return self._followed.stats()

    def _with_drafts(self, item: VerifyItem) -> VerifyItem:
        """Return the item with drafts looked up in the sequence itself, if it wants them.

        They are verified as coupled drafts, whatever the request's mode, which is exact for drafts of any origin.
        """
        if not item.sample or not item.lookup_tokens or len(item.proposal):
            return item
        room = self._engine.context_length - item.first_position - len(item.committed)
        read = self._followed.tokens(item.sequence_id, 0, item.first_position)
        drafts = look_up(np.concatenate([read, item.committed]), min(item.lookup_tokens, room))
        return replace(item, proposal=Proposal(drafts)) if len(drafts) else item

    def _step(self, items: list[VerifyItem]) -> list[VerifiedItem]:
        parts = lay_out(items)
        logits = self._followed.read([part.step_input() for part in parts])
        drawing = [part for part in parts if part.draws]
        coupled = [part for part in drawing if part.item.proposal.q is None]
        by_ratio = [part for part in drawing if part.item.proposal.q is not None]
        outcomes = self._verify_coupled(logits, coupled) | self._verify_by_ratio(logits, by_ratio)
        self._followed.keep_paths(accepted_paths(coupled, outcomes))
        answers = [self._conclude(part, outcomes.get(part.item.sequence_id)) for part in parts]
        reported = with_reports(logits, parts, outcomes, answers)
        for answer in reported:
            if answer.fault is not None:
                self._followed.withdraw(answer.sequence_id)
        return reported

    def _verify_coupled(self, logits: torch.Tensor, parts: list[ItemRows]) -> Outcomes:
        if not parts:
            return {}
        drawn = draw_tokens(*self._draw_rows(logits, parts)).to("cpu").numpy().astype(np.int32)
        pieces = np.split(drawn, np.cumsum([part.draws for part in parts])[:-1])
        return {
            part.item.sequence_id: verify_coupled(piece, part.item.proposal)
            for part, piece in zip(parts, pieces, strict=True)
        }

    def _verify_by_ratio(self, logits: torch.Tensor, parts: list[ItemRows]) -> Outcomes:
        if not parts:
            return {}
        drafted = [
            PositionRun(self._followed.sampling(part.item.sequence_id), part.next_position, len(part.item.proposal))
            for part in parts
        ]
        chains = [
            RatioChain(part.item.proposal.token_ids, cast(SparseProbabilities, part.item.proposal.q), uniforms)
            for part, uniforms in zip(parts, uniform_numbers(drafted), strict=True)
        ]
        verified = verify_by_ratio(*self._draw_rows(logits, parts), chains)
        return {part.item.sequence_id: outcome for part, outcome in zip(parts, verified, strict=True)}

    def _draw_rows(self, logits: torch.Tensor, parts: list[ItemRows]) -> tuple[torch.Tensor, SamplingRows]:
        """Return the logits of all draws of `parts`, end to end, and how to draw from them."""
        runs = [run for part in parts for run in runs_of(self._followed, part)]
        rows = select_rows(logits, [part.first_draw + np.arange(part.draws) for part in parts])
        return rows, SamplingRows.of_runs(runs, device=logits.device)

    def _conclude(self, part: ItemRows, outcome: VerifiedProposal | None) -> VerifiedItem:
        """Roll the KV back to what was accepted; an item without an outcome was only to be read."""
        item = part.item
        if outcome is None:
            return VerifiedItem(item.sequence_id, item.epoch)
        if (fault := self._followed.fault(item.sequence_id)) is not None:
            return VerifiedItem(item.sequence_id, item.epoch, fault=fault)
        if INVALID_TOKEN in outcome.token_ids:
            return VerifiedItem(item.sequence_id, item.epoch, fault=self._fault(item.sequence_id))
        verified_tokens = part.next_position + outcome.accepted
        self._engine.truncate(item.sequence_id, verified_tokens)
        self._followed.publish(item.sequence_id, verified_tokens)
        return VerifiedItem(item.sequence_id, item.epoch, outcome.accepted, outcome.token_ids)

    def _fault(self, sequence_id: int) -> str:
        """Say why no token could be drawn."""
        if self._followed.has_rules(sequence_id):
            return "no token can be drawn: the request's options ban all of them, or the target's logits are not finite"
        return NOT_FINITE
