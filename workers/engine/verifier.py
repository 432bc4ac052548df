"""The target's side of a round: one packed step over all sequences, one draw per position, one walk per proposal."""

import time
from collections.abc import Iterable

import numpy as np

from workers.decoding.sampling import INVALID_TOKEN, SamplingRows, draw_tokens
from workers.decoding.verification import verify_chain
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.engine.step import StepInput
from workers.messages import TokenIds, VerifiedItem, VerifyItem, VerifyRequest, VerifyResponse, WorkerStats


class Verifier:
    """Verifies proposals with a target engine and keeps the KV of exactly what was accepted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followed = FollowedSequences(engine)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Run one step; answers come in the order of the items."""
        began = time.perf_counter()
        live = [item for item in request.items if self._followed.accept(item)]
        drawn = self._draw(live) if live else {}
        answers = tuple(
            self._conclude(item, drawn[item.sequence_id])
            if item.sequence_id in drawn
            else VerifiedItem(item.sequence_id, item.epoch, lost=True)
            for item in request.items
        )
        return VerifyResponse(answers, compute_ms=(time.perf_counter() - began) * 1e3)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their KV blocks; unknown ids are ignored."""
        self._followed.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        return self._followed.stats()

    def _draw(self, items: list[VerifyItem]) -> dict[int, TokenIds]:
        """Return per sequence the target's draws at the k + 1 positions of its chain; none where it only reads."""
        logits = self._followed.read(
            [
                StepInput(
                    item.sequence_id,
                    item.first_position,
                    np.concatenate([item.committed, item.proposal.token_ids]),
                    logit_rows=_rows(item),
                )
                for item in items
            ]
        )
        rows = SamplingRows.of_runs(
            [self._followed.run(item.sequence_id, _next_position(item), _rows(item)) for item in items],
            device=logits.device,
        )
        tokens = draw_tokens(logits, rows).to("cpu").numpy().astype(np.int32)
        parts = np.split(tokens, np.cumsum([_rows(item) for item in items])[:-1])
        return {item.sequence_id: part for item, part in zip(items, parts, strict=True)}

    def _conclude(self, item: VerifyItem, drawn: TokenIds) -> VerifiedItem:
        if not item.sample:
            return VerifiedItem(item.sequence_id, item.epoch)
        if (fault := self._followed.fault(item.sequence_id)) is not None:
            return VerifiedItem(item.sequence_id, item.epoch, fault=fault)
        outcome = verify_chain(drawn, item.proposal.token_ids)
        if INVALID_TOKEN in outcome.token_ids:
            return VerifiedItem(item.sequence_id, item.epoch, fault=self._fault(item.sequence_id))
        self._engine.truncate(item.sequence_id, _next_position(item) + outcome.accepted)
        return VerifiedItem(item.sequence_id, item.epoch, outcome.accepted, outcome.token_ids)

    def _fault(self, sequence_id: int) -> str:
        """Say why no token could be drawn."""
        if self._followed.has_rules(sequence_id):
            return "no token can be drawn: the request's options ban all of them, or the target's logits are not finite"
        return "the target's logits are not finite for this sequence"


def _rows(item: VerifyItem) -> int:
    return len(item.proposal) + 1 if item.sample else 0


def _next_position(item: VerifyItem) -> int:
    """The position of the first token that this verification draws."""
    return item.first_position + len(item.committed)
