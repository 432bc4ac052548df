"""A target that speaks the synthetic language: exact ids and real accounts at hardly any cost."""

import time
from collections.abc import Iterable

from workers.emulated.language import SyntheticLanguage
from workers.emulated.sequences import Reading, SyntheticSequences, SyntheticSize
from workers.messages import VerifiedItem, VerifyItem, VerifyRequest, VerifyResponse, WorkerStats, token_ids


class SyntheticTarget:
    """Verifies chains as `workers.engine.verifier.Verifier` does; nothing is cached of other sequences or looked up."""

    def __init__(self, language: SyntheticLanguage, size: SyntheticSize) -> None:
        self._language = language
        self._sequences = SyntheticSequences(language, size)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Run one step; answers come in the order of the items.

        Raises OutOfBlocksError when the step does not fit, and ValueError for one that no router may send: a tree and
        drafts where nothing is drawn among them.
        """
        began = time.perf_counter()
        known = self._sequences.accept(request.items)
        readings = [_reading(item) for item in request.items if item.sequence_id in known]
        self._sequences.read(readings)
        answers = tuple(
            self._verified(item) if item.sequence_id in known else VerifiedItem(item.sequence_id, item.epoch, lost=True)
            for item in request.items
        )
        read_tokens = sum(len(reading.tokens) for reading in readings)
        return VerifyResponse(answers, (time.perf_counter() - began) * 1e3, read_tokens)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their KV blocks; unknown ids are ignored."""
        self._sequences.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        return self._sequences.stats()

    def _verified(self, item: VerifyItem) -> VerifiedItem:
        """Walk along the drafts, and keep what was accepted of them."""
        held = self._sequences[item.sequence_id]
        if reason := _unsupported(item, held.sampling.rules is not None):
            return VerifiedItem(item.sequence_id, item.epoch, fault=reason)
        if not item.sample:
            return VerifiedItem(item.sequence_id, item.epoch)
        length = item.first_position + len(item.committed)
        drawn: list[int] = []
        for position in range(length, len(held.tokens) + 1):
            drawn.append(self._language.token_at(held.key, held.tokens, position))
            if position == len(held.tokens) or held.tokens[position] != drawn[-1]:
                break
        accepted = len(drawn) - 1
        self._sequences.truncate(item.sequence_id, length + accepted)
        return VerifiedItem(item.sequence_id, item.epoch, accepted, token_ids(drawn))


def _reading(item: VerifyItem) -> Reading:
    if item.proposal.parents is not None:
        raise ValueError(f"sequence {item.sequence_id}: the synthetic target verifies no trees")
    if len(item.proposal) and not item.sample:
        raise ValueError(f"sequence {item.sequence_id}: drafts where nothing is drawn")
    committed, drafts = item.committed.tolist(), item.proposal.token_ids.tolist()
    return Reading(item, (*committed, *drafts), len(committed))


def _unsupported(item: VerifyItem, has_rules: bool) -> str | None:
    """Why the sequence cannot be served, if so."""
    if has_rules:
        return "the synthetic language has no logits for rules"
    if item.logprobs is not None or len(item.scored):
        return "the synthetic language has no probabilities"
    return None
