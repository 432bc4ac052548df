"""A drafter of the synthetic language that is right as often as it is told to be, and knows when it may not be."""

import time
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from workers.drafters.base import DrafterLimits
from workers.emulated.language import AcceptanceProfile, SyntheticGuesses, SyntheticLanguage, guesses_of
from workers.emulated.sequences import Reading, SyntheticSequences, SyntheticSize
from workers.messages import (
    NO_PROPOSAL,
    Branch,
    DraftAheadItem,
    DraftAheadRequest,
    DraftAheadResponse,
    DraftedAheadItem,
    Proposal,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    WorkerStats,
    token_ids,
)


class SyntheticDrafter:
    """Proposes chains for coupled verification, and branches of them. Drafters of different names err differently."""

    def __init__(
        self, language: SyntheticLanguage, size: SyntheticSize, profile: AcceptanceProfile, name: str = "synthetic"
    ) -> None:
        self._language = language
        self._profile = profile
        self._name = name
        self._sequences = SyntheticSequences(language, size)

    @property
    def limits(self) -> DrafterLimits:
        """See `Drafter.limits`."""
        size = self._sequences.size
        return DrafterLimits(self._language.vocabulary_size, size.context_length, size.block_tokens, size.total_blocks)

    def propose(self, request: ProposeRequest) -> ProposeResponse:
        """See `Drafter.propose`. Raises OutOfBlocksError, and ValueError for a step that no router may send."""
        began = time.perf_counter()
        context = self._sequences.size.context_length
        fitting = [item for item in request.items if item.first_position + len(item.committed) <= context]
        known = self._sequences.accept(fitting)
        self._sequences.read([_reading(item) for item in fitting if item.sequence_id in known])
        proposals = {item.sequence_id: self._draft(item) for item in fitting if item.sequence_id in known}
        drafting = [item for item in fitting if len(proposals.get(item.sequence_id, NO_PROPOSAL)) > 1]
        # The last draft of a chain is drawn and not read.
        self._sequences.read([_reading(item, proposals[item.sequence_id].token_ids.tolist()[:-1]) for item in drafting])
        lost = {item.sequence_id for item in fitting} - known
        answers = tuple(
            ProposedItem(
                item.sequence_id,
                item.epoch,
                proposals.get(item.sequence_id, NO_PROPOSAL),
                lost=item.sequence_id in lost,
            )
            for item in request.items
        )
        return ProposeResponse(answers, (time.perf_counter() - began) * 1e3)

    def draft_ahead(self, request: DraftAheadRequest) -> DraftAheadResponse:
        """Read each item's commits and drafts, then draft behind the likeliest outcomes of their verification.

        Branches end where a proposal of `propose` behind the same outcome would. Raises as `propose` does.
        """
        began = time.perf_counter()
        known = self._sequences.accept(request.items)
        readings = [_reading(item, item.drafts.tolist()) for item in request.items if item.sequence_id in known]
        self._sequences.read(readings)
        answers = tuple(
            DraftedAheadItem(item.sequence_id, item.epoch, self._branches(item))
            if item.sequence_id in known
            else DraftedAheadItem(item.sequence_id, item.epoch, lost=True)
            for item in request.items
        )
        return DraftAheadResponse(answers, (time.perf_counter() - began) * 1e3)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Drafter.release`."""
        self._sequences.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """See `Drafter.stats`."""
        return self._sequences.stats()

    def _guesses(self, sequence_id: int) -> SyntheticGuesses:
        held = self._sequences[sequence_id]
        return guesses_of(self._name, self._language, self._profile, held.sampling, held.prompt_tokens)

    def _draft(self, item: ProposeItem) -> Proposal:
        history = self._sequences[item.sequence_id].tokens
        return self._chain(self._guesses(item.sequence_id), history, item.draft_tokens, item.least_confidence)

    def _chain(
        self, guesses: SyntheticGuesses, history: Sequence[int], draft_tokens: int, least_confidence: float = 0.0
    ) -> Proposal:
        """Draft behind `history` as far as the context allows, each draft as if those before it were right."""
        tokens, confidence = list(history), list[float]()
        while len(confidence) < draft_tokens and len(tokens) <= self._sequences.size.context_length:
            candidates = guesses.candidates(tokens)
            if confidence and prod(confidence) * candidates.probabilities[0] < least_confidence:
                break
            tokens.append(candidates.tokens[0])
            confidence.append(candidates.probabilities[0])
        return Proposal(token_ids(tokens[len(history) :]), confidence=np.array(confidence, dtype=np.float32))

    def _branches(self, item: DraftAheadItem) -> tuple[Branch, ...]:
        """The likeliest outcomes: some drafts accepted and then a candidate that is not the next draft."""
        guesses, tokens = self._guesses(item.sequence_id), self._sequences[item.sequence_id].tokens
        length = item.first_position + len(item.committed)
        outcomes: list[tuple[float, int, int]] = []
        accepted_so_far = 1.0
        for position in range(length, len(tokens) + 1):
            candidates = guesses.candidates(tokens[:position], runners_up=True)
            draft = tokens[position] if position < len(tokens) else None
            outcomes += [
                (accepted_so_far * probability, position - length, token)
                for token, probability in zip(candidates.tokens, candidates.probabilities, strict=True)
                if token != draft and probability > 0
            ]
            accepted_so_far *= candidates.probability(draft) if draft is not None else 0.0
        likeliest = sorted(outcomes, key=lambda outcome: (-outcome[0], outcome[1:]))[: item.branches]
        branches = (
            Branch(
                accepted,
                token,
                self._chain(guesses, [*tokens[: length + accepted], token], _most_drafts(item, accepted)),
                probability,
            )
            for probability, accepted, token in likeliest
            if probability > 0
        )
        return tuple(branch for branch in branches if len(branch.proposal))


def _reading(item: ProposeItem | DraftAheadItem, drafts: Sequence[int] = ()) -> Reading:
    committed = item.committed.tolist()
    return Reading(item, (*committed, *drafts), len(committed))


def _most_drafts(item: DraftAheadItem, accepted: int) -> int:
    """Return how many drafts the allowed steps bring behind an outcome; those behind all drafts begin a step later."""
    if item.steps is None:
        return item.draft_tokens
    begins_late = item.branches == 1 or accepted == len(item.drafts)
    return min(item.draft_tokens, item.steps - begins_late)
