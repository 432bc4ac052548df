"""One sequence as the router owns it: its tokens, what each worker has read of them, and its accounts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.decoding.stopping import StopChecker
from workers.decoding.trees import proposal_depth
from workers.messages import (
    NO_TOKENS,
    FinishReason,
    GenerationRequest,
    Proposal,
    Resumption,
    SpeculationUsage,
    TokenChunk,
    TokenIds,
    TokenLogprobs,
    VerifiedItem,
)
from workers.router.acceptance import AcceptanceEstimate
from workers.router.suspicion import Suspicion
from workers.telemetry.sequence_trace import SequenceTrace


class WorkerView:
    """Which worker follows the sequence, and how many of its tokens that worker's KV holds.

    `generation` rises whenever the worker begins anew, so that answers about what it had before can be told.
    `is_reading`: a message is on its way to it whose answer nobody waits for. `suspicion` follows the sequence from
    worker to worker.
    """

    def __init__(self) -> None:
        self.worker_id: str | None = None
        self.cached_tokens = 0
        self.generation = 0
        self.is_reading = False
        self.suspicion = Suspicion()

    def assign(self, worker_id: str | None) -> None:
        """Move to another worker, which knows nothing yet; None leaves the sequence without one."""
        self.worker_id = worker_id
        self.restart()

    def restart(self) -> None:
        """The worker lost the sequence: begin again from position 0."""
        self.cached_tokens = 0
        self.generation += 1
        self.is_reading = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the last verification came to: of `drafted` drafts `accepted`, then `token_id`; up to `epoch`."""

    epoch: int
    drafted: int
    accepted: int
    token_id: int


class PromptScores:
    """How much of the prompt has been scored: each token but the first once, however often the prompt is read."""

    def __init__(self, request: GenerationRequest) -> None:
        self._prompt = request.prompt
        self._wanted = request.prompt_logprobs and request.logprobs is not None
        # Nothing stands before the first token that could say how likely it is.
        self._next_position = 1 + (request.resumption.scored_prompt_tokens if request.resumption else 0)

    @property
    def pending(self) -> bool:
        """Whether tokens of the prompt are to be scored yet, which takes the logits of every position."""
        return self._wanted and self._next_position < len(self._prompt)

    def to_score(self, start: int, end: int) -> TokenIds:
        """Return the prompt tokens behind those at positions `start` to `end` - 1, or none if all were scored."""
        if not self._wanted or min(end + 1, len(self._prompt)) <= self._next_position:
            return NO_TOKENS
        return self._prompt[start + 1 : end + 1]

    def take(self, start: int, scored: TokenLogprobs | None) -> TokenLogprobs | None:
        """Return what is new of the scores of the tokens from position `start` + 1 on.

        After a target was lost, its prompt is read again, in other pieces than before.
        """
        new = scored[max(0, self._next_position - start - 1) :] if scored is not None else None
        if not new:
            return None
        self._next_position += len(new)
        return new


class Sequence:
    """Grows by `commit` alone. `epoch` rises with every answer applied, so older answers can be told and dropped."""

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        make_detokenizer: Callable[[TokenIds], IncrementalDetokenizer],
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.epoch = 0
        self.target = WorkerView()
        self.drafter = WorkerView()
        self.drafter_name: str | None = None
        self.acceptance = AcceptanceEstimate()
        self.lookup_acceptance = AcceptanceEstimate()
        self.outcome: Outcome | None = None
        self.finish_reason: FinishReason | None = None
        self.prompt_scores = PromptScores(request)
        self.trace: SequenceTrace | None = None
        self._tokens = np.empty(len(request.prompt) + request.stop.max_tokens, dtype=np.int32)
        self._tokens[: len(request.prompt)] = request.prompt
        self._length = len(request.prompt)
        self._stop = StopChecker(request.stop, lambda: make_detokenizer(request.prompt))
        self._verifications = self._draft_tokens = self._accepted_tokens = self._fallback_rounds = 0
        self._verified_tokens = self._cached_prompt_tokens = 0
        self._accepted_per_position: list[int] = []
        if request.resumption is not None:
            self._resume(request.resumption)

    @property
    def length(self) -> int:
        """Prompt and committed tokens."""
        return self._length

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be committed."""
        return len(self._tokens) - self._length

    @property
    def verifications(self) -> int:
        """How often tokens were committed."""
        return self._verifications

    @property
    def cacheable_tokens(self) -> TokenIds | None:
        """What a target that starts the sequence may look up instead of reading it; None if it has to read it all."""
        return None if self.prompt_scores.pending else self.tokens(0, self._length)

    def tokens(self, start: int, end: int) -> TokenIds:
        """Return a copy of the tokens at positions `start` to `end` - 1."""
        return self._tokens[start:end].copy()

    def read_by_target(self, end: int, verified: VerifiedItem) -> TokenChunk | None:
        """The target's KV holds the tokens up to position `end` - 1, or what it says; nothing was drawn.

        Return what there is to tell. A sequence that may have no tokens at all ends when its prompt is read.
        """
        scores = self.prompt_scores.take(self.target.cached_tokens, verified.scored)
        self._note_reused(verified)
        self.epoch += 1
        self.target.cached_tokens = end if verified.cached_tokens is None else verified.cached_tokens
        if end == self._length and self.remaining_tokens == 0:
            self.finish_reason = FinishReason.LENGTH
        elif scores is None:
            return None
        return TokenChunk(NO_TOKENS, None, self.finish_reason, self.usage(), prompt_logprobs=scores)

    def read_by_drafter(self, read_tokens: int, proposal: Proposal) -> None:
        """The drafter read commits up to position `read_tokens` and, of a chain, its own drafts but the last.

        Which nodes of a tree it holds, and where, is its own affair: nothing beyond the commits is counted on.
        """
        own_drafts = max(0, len(proposal) - 1) if proposal.parents is None else 0
        self.drafter.cached_tokens = read_tokens + own_drafts

    def read_ahead_by_drafter(self) -> None:
        """While the last verification ran, the drafter read all of its drafts: it lacks the last token alone."""
        self.drafter.cached_tokens = self._length - 1

    def commit(self, verified: VerifiedItem, proposal: Proposal) -> TokenChunk:
        """Append the verified tokens, up to where the sequence ends, and return what is new.

        Both workers' KV is rolled back by arithmetic: the target keeps what it accepted, the drafter what it shares
        with the committed tokens.
        """
        scores = self.prompt_scores.take(self.target.cached_tokens, verified.scored)
        self._note_reused(verified)
        outcome = self._stop.push(verified.token_ids)
        kept = verified.token_ids[: outcome.kept_tokens]
        self.drafter.cached_tokens = min(self.drafter.cached_tokens, self._length + verified.accepted)
        self.target.cached_tokens = self._length + verified.accepted
        self._tokens[self._length : self._length + len(kept)] = kept
        self._length += len(kept)
        self._count(proposal, verified.looked_up, min(verified.accepted, len(kept)), len(kept))
        self.epoch += 1
        drafted = len(proposal) or verified.looked_up
        self.outcome = Outcome(self.epoch, drafted, verified.accepted, int(verified.token_ids[-1]))
        estimate = self.acceptance if len(proposal) else self.lookup_acceptance
        estimate.observe(proposal_depth(proposal) or verified.looked_up, verified.accepted)
        self.finish_reason = outcome.finish_reason
        logprobs = verified.logprobs[: len(kept)] if verified.logprobs is not None else None
        return TokenChunk(kept, outcome.visible_characters, outcome.finish_reason, self.usage(), logprobs, scores)

    def count_fallback_round(self) -> None:
        """A round wanted drafts and had no drafter to ask."""
        self._fallback_rounds += 1

    def usage(self) -> SpeculationUsage:
        """Return what speculation did so far."""
        return SpeculationUsage(
            verifications=self._verifications,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            committed_tokens=self._verified_tokens,
            accepted_per_position=tuple(self._accepted_per_position),
            drafter=self.drafter_name,
            fallback_rounds=self._fallback_rounds,
            cached_prompt_tokens=self._cached_prompt_tokens,
        )

    def _resume(self, known: Resumption) -> None:
        """Take over what another router committed: everything it knew but what its workers hold."""
        outcome = self._stop.push(known.committed)
        if outcome.finish_reason is not None:
            raise ValueError("a sequence that has ended cannot be resumed")
        end = self._length + len(known.committed)
        self._tokens[self._length : end] = known.committed
        self._length = end
        usage = known.usage
        self.drafter_name = usage.drafter
        self._verifications, self._fallback_rounds = usage.verifications, usage.fallback_rounds
        self._draft_tokens, self._accepted_tokens = usage.draft_tokens, usage.accepted_tokens
        self._verified_tokens, self._cached_prompt_tokens = usage.committed_tokens, usage.cached_prompt_tokens
        self._accepted_per_position = list(usage.accepted_per_position)
        # Its prompt was read before, so what is found of it now was not cached then.
        self.epoch = min(1, self._verifications)

    def _note_reused(self, verified: VerifiedItem) -> None:
        # Only the first reading counts: after a failover or a preemption, a target finds what was read for the request.
        if self.epoch == 0:
            self._cached_prompt_tokens = min(verified.reused_tokens, len(self.request.prompt))

    def _count(self, proposal: Proposal, looked_up: int, accepted: int, committed: int) -> None:
        self._verifications += 1
        self._draft_tokens += len(proposal) or looked_up
        self._accepted_tokens += accepted
        self._verified_tokens += committed
        missing = (proposal_depth(proposal) or looked_up) - len(self._accepted_per_position)
        self._accepted_per_position.extend([0] * missing)
        for position in range(accepted):
            self._accepted_per_position[position] += 1
