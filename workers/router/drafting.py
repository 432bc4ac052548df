"""A lane's dealings with the drafters: it asks them for drafts, waits no longer than these are worth, drafts ahead."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from workers.errors import LinkError
from workers.log_lines import FewOfAKind
from workers.messages import (
    DraftAheadItem,
    DraftAheadRequest,
    DraftAheadResponse,
    DraftedAheadItem,
    Proposal,
    ProposeRequest,
    ProposeResponse,
    Verification,
)
from workers.router.ahead import MOST_BRANCHES, AheadBudget, AheadJudge
from workers.router.config import RouterConfig
from workers.router.detached import detached_task
from workers.router.goodput import RoundTimes, worth_waiting
from workers.router.peer import Peer
from workers.router.roster import Roster, reads_much
from workers.router.rounds import (
    INLINE_READ_TOKENS,
    PlannedSequence,
    apply_proposed,
    drafting_suspect,
    in_allowed_company,
    proposal_fault,
    propose_items,
)
from workers.router.sequence import Sequence
from workers.router.step_times import StepTimeFit
from workers.router.suspicion import Suspect
from workers.router.totals import RoundClock, TotalsCounter

logger = logging.getLogger(__name__)
logger.addFilter(FewOfAKind())
LATE_FACTOR = 4.0
LATE_FLOOR_S = 0.05
"""Drafts that take longer than this many times what they should, and longer than this, are left out of their round."""
MOST_READING_ROUNDS = 4
"""A drafter that drafts for others reads no longer at a time than so many verifications take."""


@dataclass(frozen=True, slots=True)
class AheadTicket:
    """Drafting ahead of the verification at `epoch`, on its way or done; see `WorkerView.generation`."""

    epoch: int
    generation: int
    answers: "asyncio.Task[Mapping[int, DraftedAheadItem]]"


class Drafting:
    """Everything between one lane and the drafters. `failed` is told of a drafter that did not answer."""

    def __init__(
        self,
        roster: Roster,
        config: RouterConfig,
        totals: TotalsCounter,
        judge: AheadJudge,
        is_current: Callable[[int, int], bool],
        failed: Callable[[str, LinkError], None],
    ) -> None:
        self._roster = roster
        self._config = config
        self._totals = totals
        self._judge = judge
        self._is_current = is_current
        self._failed = failed
        self._tickets: dict[int, AheadTicket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def forget(self, sequence_id: int) -> None:
        """The sequence left the lane."""
        self._tickets.pop(sequence_id, None)

    # --- drafts for a round ---------------------------------------------------------------------------------

    async def proposals(
        self, planned: list[PlannedSequence], clock: RoundClock, least_confidence: float, times: RoundTimes | None
    ) -> dict[int, Proposal]:
        """Return the proposals to verify in this round, by sequence id.

        What was drafted ahead is there already; the others' drafters are asked, all at once, if by `times` that is
        worth waiting for. One that fails costs its sequences this round's drafts, and so does one that is late.
        """
        began = time.perf_counter()
        clock.drafted_ahead = any(plan.sequence.sequence_id in self._tickets for plan in planned)
        ready = await self._drafted_ahead(planned)
        # Some may have left meanwhile, and nothing can be promised to them any more.
        planned = [plan for plan in planned if self._is_current(plan.sequence.sequence_id, plan.epoch)]
        if times is not None and not self._worth_waiting(planned, ready, times):
            planned = [replace(plan, draft_tokens=0) for plan in planned]
        # Drafters come and go while the round waits; it deals with those that are there now.
        drafters = dict(self._roster)
        asked = [self._with_draft_blocks(plan, drafters) for plan in planned if plan.sequence.sequence_id not in ready]
        contexts = {worker_id: drafter.registration.context_length for worker_id, drafter in drafters.items()}
        requests = propose_items(
            asked, contexts, self._read_budgets(planned, times), self._config.verification, least_confidence
        )
        sequences = {plan.sequence.sequence_id: plan.sequence for plan in asked}
        # What is only read can wait until the target verifies; where that feels it, there is no better time than now.
        reads_first = self._judge.devices_are_shared
        if reads_first:
            self._start_reads(requests.reads, drafters, sequences)
        clock.drafters_read = any(
            (reads_first and worker_id in requests.reads) or self._roster.is_reading(worker_id) or reads_much(request)
            for worker_id, request in requests.drafts.items()
        )
        drafted: dict[int, Proposal] = {}
        awaited = {
            self._keep(detached_task(self._ask(drafters[worker_id], request, sequences, drafted, clock))): request
            for worker_id, request in requests.drafts.items()
        }
        if not reads_first:
            self._start_reads(requests.reads, drafters, sequences)
        if awaited:
            patience_s = max(self._patience_s(worker_id, request) for worker_id, request in requests.drafts.items())
            _, late = await asyncio.wait(awaited, timeout=patience_s)
            self._totals.add(late_drafts=sum(len(awaited[task].items) for task in late))
        clock.draft_wait_ms = (time.perf_counter() - began) * 1e3
        # A copy: what comes late must not join the round. Its drafter has read the commits, and that is noted then.
        return ready | drafted

    def _start_reads(
        self, reads: Mapping[str, ProposeRequest], drafters: Mapping[str, Peer], sequences: Mapping[int, Sequence]
    ) -> None:
        for worker_id, request in reads.items():
            self._roster.begins_to_read(worker_id, sum(len(item.committed) for item in request.items))
            self._keep(detached_task(self._read(drafters[worker_id], request, sequences)))

    def _read_budgets(self, planned: list[PlannedSequence], times: RoundTimes | None) -> dict[str, int]:
        """Return how many tokens each drafter may read without drafting: those it drafts for would wait for it.

        Then it reads no longer than a few verifications take, during which those others go without.
        """
        most = self._config.prefill_chunk_tokens
        drafting = {plan.drafter_id for plan in planned if plan.draft_tokens}
        budgets = {}
        for worker_id in self._roster:
            readable = None
            if times is not None and worker_id in drafting:
                patience_ms = MOST_READING_ROUNDS * times.verify.time_ms(len(planned))
                readable = self._roster.tokens_readable_in(worker_id, patience_ms)
            budgets[worker_id] = most if readable is None else min(most, max(INLINE_READ_TOKENS, readable))
        return budgets

    def _worth_waiting(self, planned: list[PlannedSequence], ready: Mapping[int, Proposal], times: RoundTimes) -> bool:
        """Whether to wait for drafts, where some are ready already, or where a drafter has yet to read."""
        drafting = {plan.drafter_id for plan in planned if plan.draft_tokens}
        reading_ms = max((self._roster.reads_for_ms(worker_id) for worker_id in drafting if worker_id), default=0.0)
        if not ready and not reading_ms:
            return True
        deciding = [plan for plan in planned if plan.samples]
        return worth_waiting(
            np.array([plan.sequence.acceptance.rate for plan in deciding]),
            np.array([plan.draft_tokens for plan in deciding]),
            np.array([plan.sequence.sequence_id in ready for plan in deciding]),
            times,
            hidden_ms=-reading_ms,
        )

    def _patience_s(self, worker_id: str, request: ProposeRequest) -> float:
        fit = self._roster.step_fit(worker_id)
        if fit is None:
            return self._config.propose_deadline_s
        return self._within_deadline(fit, max(item.draft_tokens for item in request.items), len(request.items))

    def _within_deadline(self, fit: StepTimeFit, steps: int, rows: int) -> float:
        expected_s = steps * fit.time_ms(rows) / 1e3
        return min(max(LATE_FACTOR * expected_s, LATE_FLOOR_S), self._config.propose_deadline_s)

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its round goes on without drafts.
            logger.error("a drafter's answer cannot be used", exc_info=error)

    async def _read(self, drafter: Peer, request: ProposeRequest, sequences: Mapping[int, Sequence]) -> None:
        with self._roster.reading(drafter.worker_id):
            await self._ask(drafter, request, sequences, {})

    async def _ask(
        self,
        drafter: Peer,
        request: ProposeRequest,
        sequences: Mapping[int, Sequence],
        into: dict[int, Proposal],
        clock: RoundClock | None = None,
    ) -> None:
        """Ask one drafter and note what it has read; its proposals come into `into`."""
        await drafter.releases_sent()
        # A sequence that left since the round was planned is released already; asking would start it again for ever.
        current = [item for item in request.items if self._is_current(item.sequence_id, item.epoch)]
        items = in_allowed_company(current, sequences, drafter.under_way)
        with _reading(sequences[item.sequence_id] for item in items) as generations:
            sent = ProposeRequest(items)
            suspects = [drafting_suspect(sequences[item.sequence_id], item) for item in items]
            answer = cast(ProposeResponse | None, await self._answer(drafter, sent, suspects) if items else None)
        if answer is None:
            return
        self._roster.observe_steps(drafter.worker_id, sent, answer)
        if clock is not None:
            clock.draft_compute_ms = max(clock.draft_compute_ms, answer.compute_ms)
            self._totals.metrics.drafted(drafter.registration.name, answer.compute_ms)
        for item, generation, proposed in zip(items, generations, answer.items, strict=True):
            into[item.sequence_id] = apply_proposed(sequences[item.sequence_id], generation, item, proposed)

    async def _answer(
        self, drafter: Peer, message: ProposeRequest | DraftAheadRequest, suspects: Iterable[Suspect]
    ) -> ProposeResponse | DraftAheadResponse | None:
        try:
            with drafter.under_way.step(suspects) as step:
                answer = await drafter.link.call(message, self._config.propose_deadline_s)
        except LinkError as error:
            if self._roster.get(drafter.worker_id) is drafter:
                self._failed(drafter.worker_id, error)
            return None
        step.clear()
        return cast(ProposeResponse | DraftAheadResponse, answer)

    def _with_draft_blocks(self, plan: PlannedSequence, drafters: Mapping[str, Peer]) -> PlannedSequence:
        """Promise blocks at the sequence's drafter; where they run out it drafts less, or does without it for now."""
        sequence, drafter = plan.sequence, drafters.get(plan.sequence.drafter.worker_id or "")
        if drafter is None or not plan.drafts or sequence.length > drafter.registration.context_length:
            return plan
        # The drafter does not read its last draft, which may therefore stand just outside its context.
        wanted = min(plan.draft_tokens, drafter.registration.context_length - sequence.length)
        granted = drafter.ledger.extend(sequence.sequence_id, sequence.length, wanted)
        if granted is None:
            drafter.release(sequence.sequence_id)
            sequence.drafter.assign(None)
        return plan if granted is None or granted == wanted else replace(plan, draft_tokens=granted)

    # --- drafting ahead -------------------------------------------------------------------------------------

    def draft_ahead(
        self, verified: Iterable[PlannedSequence], proposals: Mapping[int, Proposal], budget: AheadBudget
    ) -> None:
        """Let the drafters go on while the target verifies `proposals`; nothing waits for it here."""
        items: dict[str, list[tuple[Sequence, DraftAheadItem]]] = {}
        for plan in verified:
            item = self._ahead_item(plan, proposals.get(plan.sequence.sequence_id), budget)
            if item is not None and (worker_id := plan.sequence.drafter.worker_id) is not None:
                items.setdefault(worker_id, []).append((plan.sequence, item))
        for worker_id, of_worker in items.items():
            sequences = [sequence for sequence, _ in of_worker]
            request = DraftAheadRequest(tuple(item for _, item in of_worker))
            answers = detached_task(self._ask_ahead(self._roster[worker_id], request, sequences))
            for sequence in sequences:
                ticket = AheadTicket(sequence.epoch, sequence.drafter.generation, answers)
                self._tickets[sequence.sequence_id] = ticket

    def _ahead_item(
        self, plan: PlannedSequence, proposal: Proposal | None, budget: AheadBudget
    ) -> DraftAheadItem | None:
        """Return what to draft ahead for a sequence, if its drafter has caught up and can guess what will be drawn."""
        sequence, view = plan.sequence, plan.sequence.drafter
        verification = sequence.request.speculation.verification or self._config.verification
        drafter = self._roster.get(view.worker_id or "")
        if not (plan.samples and plan.draft_tokens) or drafter is None or view.is_reading:
            return None
        if view.suspicion.is_isolated or drafter.under_way.is_isolating:
            return None
        if verification is Verification.RATIO and sequence.request.sampling.temperature > 0:
            return None
        drafts = proposal.token_ids if proposal is not None else sequence.tokens(0, 0)
        start = min(view.cached_tokens, sequence.length - 1)
        room = drafter.registration.context_length - sequence.length - len(drafts) - 1
        left = sequence.remaining_tokens - len(drafts) - 2
        draft_tokens = min(budget.draft_tokens, room, left)
        if draft_tokens < 1 or sequence.length - start > INLINE_READ_TOKENS:
            return None
        # Only what is committed and verified has room for certain; the drafter gives up branches that have none.
        if drafter.ledger.extend(sequence.sequence_id, sequence.length, len(drafts)) != len(drafts):
            return None
        return DraftAheadItem(
            sequence.sequence_id,
            plan.epoch,
            start,
            sequence.tokens(start, sequence.length),
            drafts,
            draft_tokens,
            budget.branches,
            budget.steps,
            None if sequence.trace is None else sequence.trace.ahead_parent,
        )

    async def _ask_ahead(
        self, drafter: Peer, request: DraftAheadRequest, sequences: list[Sequence]
    ) -> Mapping[int, DraftedAheadItem]:
        if drafter.under_way.is_isolating:  # by now: when this was planned, it was not
            return {}
        with _reading(sequences) as generations:
            suspects = [
                drafting_suspect(sequence, item) for sequence, item in zip(sequences, request.items, strict=True)
            ]
            answer = cast(DraftAheadResponse | None, await self._answer(drafter, request, suspects))
        if answer is None:
            return {}
        for sequence, generation, item in zip(sequences, generations, answer.items, strict=True):
            if item.lost and sequence.drafter.generation == generation:
                sequence.drafter.restart()
        return {item.sequence_id: item for item in answer.items if not item.lost}

    async def _drafted_ahead(self, planned: list[PlannedSequence]) -> dict[int, Proposal]:
        """Return the proposals that were drafted for what really came.

        Drafters that are still at it are waited for, as they could not draft anything else meanwhile.
        """
        tickets = [
            (plan, ticket)
            for plan in planned
            if (ticket := self._tickets.pop(plan.sequence.sequence_id, None)) is not None
        ]
        unfinished = {ticket.answers for _, ticket in tickets if not ticket.answers.done()}
        if unfinished:
            await asyncio.wait(unfinished, timeout=self._ahead_patience_s(tickets))
        ready: dict[int, Proposal] = {}
        for plan, ticket in tickets:
            if ticket.answers.done() and (proposal := self._take(plan, ticket)) is not None:
                ready[plan.sequence.sequence_id] = proposal
        return ready

    def _ahead_patience_s(self, tickets: list[tuple[PlannedSequence, AheadTicket]]) -> float:
        fits = [self._roster.step_fit(plan.sequence.drafter.worker_id) for plan, _ in tickets]
        steps = self._config.max_draft_tokens + 1
        rows = len(tickets) * MOST_BRANCHES
        return max(
            self._config.propose_deadline_s if fit is None else self._within_deadline(fit, steps, rows) for fit in fits
        )

    def _take(self, plan: PlannedSequence, ticket: AheadTicket) -> Proposal | None:
        """Note what the drafter has read, and return what it drafted ahead if what it expected came."""
        sequence, outcome = plan.sequence, plan.sequence.outcome
        drafted = ticket.answers.result().get(sequence.sequence_id)
        if drafted is None or ticket.generation != sequence.drafter.generation:
            return None
        if sequence.epoch != ticket.epoch + 1 or outcome is None or outcome.epoch != sequence.epoch:
            return None
        sequence.read_ahead_by_drafter()
        if plan.draft_tokens == 0:
            return None
        proposal = _branch_for(drafted, outcome.accepted, outcome.token_id, plan.draft_tokens)
        hit = proposal is not None
        self._totals.add(ahead_hits=hit, ahead_misses=not hit)
        self._totals.metrics.drafted_ahead(sequence.drafter_name, hit)
        if sequence.trace is not None:
            sequence.trace.ahead_hit = hit
        return proposal


@contextlib.contextmanager
def _reading(sequences: Iterable[Sequence]) -> Iterator[list[int]]:
    """Mark the drafters' views as reading, and yield their generations; views that begin anew meanwhile are not."""
    views = [sequence.drafter for sequence in sequences]
    generations = [view.generation for view in views]
    for view in views:
        view.is_reading = True
    try:
        yield generations
    finally:
        for view, generation in zip(views, generations, strict=True):
            if view.generation == generation:
                view.is_reading = False


def _branch_for(drafted: DraftedAheadItem, accepted: int, token_id: int, draft_tokens: int) -> Proposal | None:
    """Return what was drafted for this outcome, `draft_tokens` of it at most; None if nothing was."""
    for branch in drafted.branches:
        if (branch.accepted, branch.token_id) == (accepted, token_id):
            confidence = branch.proposal.confidence
            proposal = Proposal(
                branch.proposal.token_ids[:draft_tokens],
                confidence=None if confidence is None else confidence[:draft_tokens],
            )
            return None if proposal_fault(proposal, draft_tokens) else proposal
    return None
