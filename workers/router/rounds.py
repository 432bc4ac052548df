"""One round as data: what to ask the drafters, what to ask the target, and how answers become commits. Pure."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from workers.decoding.trees import check_tree
from workers.log_lines import FewOfAKind
from workers.messages import (
    NO_PROPOSAL,
    DraftAheadItem,
    Proposal,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    SparseProbabilities,
    Verification,
    VerifyItem,
    VerifyRequest,
)
from workers.router.sequence import Sequence
from workers.router.suspicion import StepsUnderWay, Suspect

logger = logging.getLogger(__name__)
logger.addFilter(FewOfAKind())
INLINE_READ_TOKENS = 32
"""Where a drafter lacks more than so many tokens of a sequence, it reads them while rounds go on without its drafts."""


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence's part in a round.

    The target reads up to position `target_end` and draws if that is the sequence's length and it may grow;
    `draft_tokens` is what the policy allows, before the drafter's own limits. `drafts` says whether the sequence is
    drafted for at all, so that the drafter, `drafter_id`, reads its prompt. `lookup_tokens` is how many drafts the
    target may look up if it gets none.
    """

    sequence: Sequence
    epoch: int
    target_end: int
    draft_tokens: int
    drafts: bool
    drafter_id: str | None
    lookup_tokens: int = 0

    @property
    def samples(self) -> bool:
        """Whether the target draws tokens in this round, rather than only reading a prompt chunk."""
        return self.target_end == self.sequence.length and self.sequence.remaining_tokens > 0


def plan_round(
    cohort: Iterable[Sequence], draft_lengths: Mapping[int, int], prefill_chunk_tokens: int
) -> list[PlannedSequence]:
    """Split the prompt tokens that one step may read among the cohort; decoding sequences always take part.

    `draft_lengths` gives k by sequence id. A sequence whose prompt gets no share sits this round out.
    """
    budget = prefill_chunk_tokens
    planned = []
    for sequence in cohort:
        pending = sequence.length - sequence.target.cached_tokens
        share = pending if pending == 1 else min(pending, budget)
        if share == 0:
            continue
        budget -= share if pending > 1 else 0
        target_end = sequence.target.cached_tokens + share
        # A verification of k drafts commits up to k + 1 tokens, which the budget of the request must hold.
        limit = max(0, min(draft_lengths[sequence.sequence_id], sequence.remaining_tokens - 1))
        draft_tokens = limit if target_end == sequence.length else 0
        planned.append(
            PlannedSequence(sequence, sequence.epoch, target_end, draft_tokens, limit > 0, sequence.drafter.worker_id)
        )
    return planned


@dataclass(frozen=True, slots=True)
class DrafterRequests:
    """What to ask the drafters, by worker id: for drafts, which the round waits for, and to read, which it does not."""

    drafts: Mapping[str, ProposeRequest]
    reads: Mapping[str, ProposeRequest]


def propose_items(
    planned: Iterable[PlannedSequence],
    drafter_contexts: Mapping[str, int],
    read_budgets: Mapping[str, int],
    verification: Verification,
    least_confidence: float = 0.0,
) -> DrafterRequests:
    """Return what to ask; `verification` is for requests that do not choose.

    A drafter that has not caught up with its sequence reads more of it and drafts only when it has. All of its reading
    in one round is within its share of `read_budgets`, in tokens. Where its context ends, its part in the sequence
    ends.
    """
    budgets = dict(read_budgets)
    drafts: dict[str, list[ProposeItem]] = defaultdict(list)
    reads: dict[str, list[ProposeItem]] = defaultdict(list)
    for plan in planned:
        sequence, view = plan.sequence, plan.sequence.drafter
        if view.worker_id is None or view.worker_id not in drafter_contexts or not plan.drafts or view.is_reading:
            continue
        room = drafter_contexts[view.worker_id] - sequence.length + 1
        if room <= 0:
            continue
        # Drafts whose verification never came back are still cached; the last committed token is always read again.
        start = min(view.cached_tokens, sequence.length - 1)
        if plan.target_end == sequence.length and sequence.length - start <= INLINE_READ_TOKENS:
            end, draft_tokens = sequence.length, min(plan.draft_tokens, room)
        else:
            end, draft_tokens = min(plan.target_end, start + budgets[view.worker_id], sequence.length - 1), 0
        if end <= start or (draft_tokens == 0 and end == sequence.length):
            continue
        budgets[view.worker_id] -= 0 if draft_tokens else end - start
        item = ProposeItem(
            sequence.sequence_id,
            plan.epoch,
            start,
            sequence.tokens(start, end),
            draft_tokens,
            sampling=sequence.request.sampling if start == 0 else None,
            prompt_tokens=len(sequence.request.prompt) if start == 0 else 0,
            verification=sequence.request.speculation.verification or verification,
            prompt=sequence.tokens(0, sequence.length) if start == 0 else None,
            cache_salt=sequence.request.cache_salt if start == 0 else None,
            least_confidence=least_confidence,
            trace_parent=None if sequence.trace is None else sequence.trace.draft_parent,
        )
        (drafts if draft_tokens else reads)[view.worker_id].append(item)
    return DrafterRequests(_requests(drafts), _requests(reads))


def in_allowed_company(
    items: SequenceOf[ProposeItem], sequences: Mapping[int, Sequence], under_way: StepsUnderWay
) -> tuple[ProposeItem, ...]:
    """Return those of `items` that the drafter may be asked for now, given what it has to do yet.

    Sequences that may have ended drafters are asked for only one at a time, while nobody else is.
    """
    if under_way.is_isolating:
        return ()
    free = tuple(item for item in items if not sequences[item.sequence_id].drafter.suspicion.is_isolated)
    return free or (() if under_way else tuple(items[:1]))


def drafting_suspect(sequence: Sequence, item: ProposeItem | DraftAheadItem) -> Suspect:
    """Return the sequence as a suspect, should its drafter fail over this item."""
    drafts = len(item.drafts) if isinstance(item, DraftAheadItem) else 0
    reach = item.first_position + len(item.committed) + drafts + item.draft_tokens
    return Suspect(sequence.drafter.suspicion, reach)


def verifying_suspects(planned: Iterable[PlannedSequence], proposals: Mapping[int, Proposal]) -> list[Suspect]:
    """Return the sequences of a target's step as suspects, should it fail."""
    suspects = []
    for plan in planned:
        drafts = len(proposals.get(plan.sequence.sequence_id, NO_PROPOSAL)) or plan.lookup_tokens
        suspects.append(Suspect(plan.sequence.target.suspicion, plan.target_end + drafts))
    return suspects


def _requests(items: Mapping[str, list[ProposeItem]]) -> dict[str, ProposeRequest]:
    return {worker_id: ProposeRequest(tuple(of_worker)) for worker_id, of_worker in items.items()}


def proposal_fault(proposal: Proposal, draft_tokens: int) -> str | None:
    """Say why `proposal` must not reach the target, which was asked to hold `draft_tokens` drafts at most; or None.

    No path is longer than its tree has nodes, so this bounds what a verification can commit, too.
    """
    if len(proposal) > draft_tokens:
        return f"{len(proposal)} drafts where {draft_tokens} were asked for"
    if proposal.q is not None and (reason := _q_fault(proposal, proposal.q)):
        return reason
    if proposal.parents is not None:
        try:
            check_tree(proposal.token_ids, proposal.parents)
        except ValueError as error:
            return str(error)
    return None


def _q_fault(proposal: Proposal, q: SparseProbabilities) -> str | None:
    if proposal.parents is not None:
        return "a tree with the q of a chain"
    if q.token_ids.shape != q.probabilities.shape or len(q.token_ids) != len(proposal):
        return f"q of shape {q.probabilities.shape} for {len(proposal)} drafts"
    drawn = (q.token_ids == proposal.token_ids[:, None]) & (q.probabilities > 0)
    return None if drawn.any(axis=1).all() else "a draft that its q gives no probability"


def apply_proposed(sequence: Sequence, generation: int, item: ProposeItem, answer: ProposedItem) -> Proposal:
    """Note what the drafter has read of `item` and return its proposal, which is none if the answer comes too late.

    `generation` is that of the drafter's view when it was asked. A proposal that cannot be verified is the drafter's
    fault and costs the target nothing: it is dropped.
    """
    view = sequence.drafter
    if view.generation != generation or answer.epoch != item.epoch or sequence.finish_reason is not None:
        return NO_PROPOSAL
    if answer.lost:
        view.restart()
        return NO_PROPOSAL
    read_tokens = item.first_position + len(item.committed) if answer.cached_tokens is None else answer.cached_tokens
    if answer.epoch != sequence.epoch:
        # The sequence has grown meanwhile: what was committed then still is, the drafts are of no use.
        sequence.read_by_drafter(min(read_tokens, sequence.length - 1), NO_PROPOSAL)
        return NO_PROPOSAL
    fault = proposal_fault(answer.proposal, item.draft_tokens)
    if fault is not None:
        logger.warning("a proposal of %s is dropped: %s", view.worker_id, fault)
    proposal = NO_PROPOSAL if fault is not None else answer.proposal
    sequence.read_by_drafter(read_tokens, proposal)
    return proposal


def verify_request(planned: Iterable[PlannedSequence], proposals: Mapping[int, Proposal]) -> VerifyRequest:
    """Return the target's step for the planned sequences; sequences without a proposal are decoded plainly."""
    items = []
    for plan in planned:
        sequence = plan.sequence
        start = sequence.target.cached_tokens
        items.append(
            VerifyItem(
                sequence.sequence_id,
                plan.epoch,
                start,
                sequence.tokens(start, plan.target_end),
                proposals.get(sequence.sequence_id, NO_PROPOSAL) if plan.samples else NO_PROPOSAL,
                sample=plan.samples,
                sampling=sequence.request.sampling if start == 0 else None,
                prompt_tokens=len(sequence.request.prompt) if start == 0 else 0,
                logprobs=sequence.request.logprobs,
                scored=sequence.prompt_scores.to_score(start, plan.target_end),
                prompt=sequence.cacheable_tokens if start == 0 else None,
                cache_salt=sequence.request.cache_salt if start == 0 else None,
                lookup_tokens=plan.lookup_tokens if plan.samples else 0,
                trace_parent=None if sequence.trace is None else sequence.trace.verify_parent,
            )
        )
    return VerifyRequest(tuple(items))
