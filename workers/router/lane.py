"""The rounds of one target: draft, verify, commit, for as long as it has sequences."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from workers.decoding.trees import proposal_depth
from workers.errors import LinkError, UnfitWorkerError
from workers.messages import (
    NO_PROPOSAL,
    GenerationFailed,
    Proposal,
    TokenChunk,
    VerifiedItem,
    VerifyRequest,
    VerifyResponse,
)
from workers.router.breaker import breakeven_rate
from workers.router.config import RouterConfig
from workers.router.draft_length import DraftLengthPolicy, DraftPlan
from workers.router.draft_planning import DraftPlanner
from workers.router.drafting import Drafting
from workers.router.finite_steps import FiniteSteps
from workers.router.peer import Peer
from workers.router.prefill import PrefillLimits
from workers.router.request_record import note_committed, note_drafting, note_placed, note_verified, note_verifying
from workers.router.roster import Roster
from workers.router.rounds import PlannedSequence, plan_round, verify_request, verifying_suspects
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.totals import RoundClock, TotalsCounter
from workers.router.turns import Turns

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaneEvents:
    """What a lane tells its router: a sequence ended, or must make room; a worker failed, or does not pay."""

    finished: Callable[[RunningSequence], None]
    preempted: Callable[[RunningSequence], None]
    drafter_failed: Callable[[str, LinkError], None]
    drafter_benched: Callable[[str], None]
    target_failed: Callable[[str, LinkError], None]


class Lane:
    """Runs the cohorts of one target, each a round at a time. Sequences join and leave between rounds.

    Messages to the target are answered in order: while one cohort is verified, the next one's verification waits
    there, and others are drafted for. A `draining` lane gets no sequences any more.
    """

    def __init__(
        self,
        target: Peer,
        roster: Roster,
        config: RouterConfig,
        policy: DraftLengthPolicy,
        totals: TotalsCounter,
        events: LaneEvents,
    ) -> None:
        self.target = target
        self.draining = False
        self.running: dict[int, RunningSequence] = {}
        self._roster = roster
        self._config = config
        self._totals = totals
        self._events = events
        self._planner = DraftPlanner(policy, roster, config)
        self._drafting = Drafting(roster, config, totals, self._planner.times.ahead, self._is_at, events.drafter_failed)
        self._finite_steps = FiniteSteps()
        self._turns = Turns(config.max_batch_sequences)
        self._rounds: set[asyncio.Task[None]] = set()
        self._failure: LinkError | None = None
        self._wake = asyncio.Event()
        self._prefill_limits = PrefillLimits(
            config.prefill_chunk_tokens, target.registration.block_tokens, config.prefill_latency_factor
        )

    def join(self, running: RunningSequence) -> None:
        """Let the sequence take part from its cohort's next round on."""
        running.sequence.target.assign(self.target.worker_id)
        self.running[running.sequence.sequence_id] = running
        note_placed(running, self.target.worker_id)
        self._wake.set()

    def leave(self, sequence_id: int) -> None:
        """Take the sequence out; a round in progress drops its answer."""
        self.running.pop(sequence_id, None)
        self._planner.forget(sequence_id)
        self._drafting.forget(sequence_id)

    async def run(self) -> None:
        """Run rounds until the target fails or the task is cancelled."""
        try:
            while self._failure is None:
                await self._wake.wait()
                self._wake.clear()
                try:
                    self._start_rounds()
                except Exception:
                    # A fault of the router itself must not leave its sequences waiting for ever.
                    logger.exception("rounds cannot be started")
                    self._fail(list(self.running.values()), "the router failed while planning a round")
            self._events.target_failed(self.target.worker_id, self._failure)
        finally:
            for task in self._rounds:
                task.cancel()

    # --- cohorts --------------------------------------------------------------------------------------------

    def _start_rounds(self) -> None:
        """Begin the rounds whose turn it is."""
        if self._failure is not None or not self._turns.waiting(self.running):
            return
        plan = self._planner.plan(self.running.values())
        cohorts = self._planner.cohorts(plan, self.running)
        alone = len(set(cohorts.values())) == 1
        for number, members in self._turns.next_rounds(self.running, cohorts).items():
            task = asyncio.get_running_loop().create_task(self._run_round(number, members, plan, alone))
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)

    async def _run_round(self, number: int, members: list[RunningSequence], plan: DraftPlan, alone: bool) -> None:
        try:
            await self._round(members, plan, alone and self._turns.is_single)
        except LinkError as error:
            self._failure = self._failure or error
        except Exception:
            logger.exception("round failed")
            self._fail(members, "the router failed while running a round")
        finally:
            self._turns.ended(number)
            self._wake.set()

    # --- one round ------------------------------------------------------------------------------------------

    async def _round(self, members: list[RunningSequence], plan: DraftPlan, alone: bool) -> None:
        """Run a round of `members`; `alone`: the target has no other cohort."""
        clock = RoundClock()
        planned = self._plan(members, plan)
        note_drafting(planned, clock)
        times = self._planner.round_times(each.sequence for each in planned)
        proposals = await self._drafting.proposals(planned, clock, plan.least_confidence, times)
        await self.target.releases_sent()
        live = [each for each in planned if self._is_at(each.sequence.sequence_id, each.epoch)]
        if not live:
            return
        for_clients = any(not self.running[each.sequence.sequence_id].is_check for each in live)
        note_verifying(live, proposals)
        request = verify_request(live, proposals)
        plain_ms = self._planner.plain_step_ms(len(self.running))
        beside_drafting = alone and self._draft_ahead(live, proposals, request)
        began = time.perf_counter()
        with self.target.under_way.step(verifying_suspects(live, proposals)):
            response = cast(VerifyResponse, await self.target.link.call(request, self._config.verify_deadline_s))
        clock.verified((time.perf_counter() - began) * 1e3, response.compute_ms)
        note_verified(live, response)
        if response.read_tokens:
            reads_prompts = any(len(item.committed) > 1 for item in request.items)
            self._planner.times.observe_step(response.read_tokens, response.compute_ms, beside_drafting, reads_prompts)
        break_even = 0.0 if times is None else breakeven_rate(times, len(live))
        for each, verified in zip(live, response.items, strict=True):
            self._apply(each, verified, proposals.get(verified.sequence_id, NO_PROPOSAL), break_even)
        self._finite_steps.observe(live, response.items)
        if self._finite_steps.have_ceased:
            raise UnfitWorkerError("its logits are not finite, step after step")
        if for_clients:
            self._totals.add_round(clock)
            self._totals.metrics.round_ended(self.target.registration.name, clock, request, response, plain_ms)
            self._observe_times(clock, live, proposals, alone and self._turns.is_single)

    def _plan(self, members: Iterable[RunningSequence], plan: DraftPlan) -> list[PlannedSequence]:
        """The next round. Beside clients a check reads no more of its prompt than a drafted sequence adds to a step."""
        in_order = sorted(members, key=lambda running: running.age)
        clients = [running.sequence for running in in_order if not running.is_check]
        checks = [running.sequence for running in in_order if running.is_check]
        lengths = self._planner.draft_tokens(plan, in_order)
        lengths |= {sequence.sequence_id: 0 for sequence in clients if sequence.target.suspicion.is_isolated}
        chunk_tokens = self._prompt_tokens(clients, lengths)
        check_tokens = min(self._config.max_draft_tokens + 1, chunk_tokens) if clients else chunk_tokens
        planned = plan_round(clients, lengths, chunk_tokens) + plan_round(checks, lengths, check_tokens)
        return self._with_blocks(planned)

    def _prompt_tokens(self, clients: list[Sequence], draft_lengths: Mapping[int, int]) -> int:
        """How many prompt tokens the step may read beside those of `clients` that decode."""
        decoding = [sequence for sequence in clients if sequence.length - sequence.target.cached_tokens == 1]
        if len(decoding) == len(clients):
            return self._config.prefill_chunk_tokens
        decoding_tokens = sum(1 + draft_lengths[sequence.sequence_id] for sequence in decoding)
        return self._prefill_limits.prompt_tokens(decoding_tokens, self._planner.times.verify.fit())

    def _with_blocks(self, planned: list[PlannedSequence]) -> list[PlannedSequence]:
        """Promise every sequence the blocks of its step. `planned` is in order of age, and so is the answer.

        Where blocks run out, the youngest sequence of the target gives up its own; the oldest therefore always goes on.
        Drafts get what is left: for them nobody has to go.
        """
        going_on = [plan for plan in planned if self._has_blocks(plan.sequence)]
        return [self._with_drafts_that_fit(plan) for plan in going_on]

    def _has_blocks(self, sequence: Sequence) -> bool:
        """Promise blocks for the tokens of the sequence. False if it had to make room, now or before."""
        while sequence.sequence_id in self.running:
            if self.target.ledger.extend(sequence.sequence_id, sequence.length, 0) is not None:
                return True
            self._events.preempted(max(self.running.values(), key=lambda running: running.age))
        return False

    def _with_drafts_that_fit(self, plan: PlannedSequence) -> PlannedSequence:
        sequence, lookup_tokens = plan.sequence, 0
        if plan.samples and not sequence.target.suspicion.is_isolated:
            running = self.running[sequence.sequence_id]
            lookup_tokens = self._planner.lookup_tokens(running, len(self.running))
            if self._planner.lacks_drafter(running):
                sequence.count_fallback_round()
                self._totals.metrics.fell_back(self.target.registration.name)
        wanted = max(plan.draft_tokens, lookup_tokens)
        granted = self.target.ledger.extend(sequence.sequence_id, sequence.length, wanted) or 0
        return replace(plan, draft_tokens=min(plan.draft_tokens, granted), lookup_tokens=min(lookup_tokens, granted))

    def _is_at(self, sequence_id: int, epoch: int) -> bool:
        """Whether the sequence still is as it was when the round was planned: it may have ended, or moved."""
        running = self.running.get(sequence_id)
        return running is not None and running.sequence.epoch == epoch

    def _draft_ahead(
        self, live: list[PlannedSequence], proposals: Mapping[int, Proposal], request: VerifyRequest
    ) -> bool:
        """Let the drafters that work for this lane alone go on during the step, as long as it takes; True if any do."""
        any_does = False
        tokens = sum(len(item.committed) + len(item.proposal) for item in request.items)
        drafters = {plan.drafter_id for plan in live if plan.draft_tokens and plan.drafter_id is not None}
        for worker_id in drafters & self._roster.keys():
            if not self._roster[worker_id].ledger.reserved.keys() <= self.running.keys():
                continue
            mine = [plan for plan in live if plan.drafter_id == worker_id]
            most = max(plan.draft_tokens for plan in mine)
            rates = [plan.sequence.acceptance.rate for plan in mine]
            budget = self._planner.ahead_budget(rates, most, tokens, worker_id)
            if budget is not None:
                self._drafting.draft_ahead(mine, proposals, budget)
                any_does = True
        return any_does

    def _observe_times(
        self, clock: RoundClock, live: list[PlannedSequence], proposals: Mapping[int, Proposal], alone: bool
    ) -> None:
        drafted = [plan for plan in live if plan.draft_tokens]
        expected_ms = None
        # A round that went on without some of its drafts has hidden nothing, and waiting for a reader says nothing.
        if drafted and not clock.drafters_read and all(plan.sequence.sequence_id in proposals for plan in drafted):
            steps = max(plan.draft_tokens for plan in drafted)
            expected_ms = self._planner.expected_draft_ms(drafted[0].drafter_id, steps, len(drafted))
        self._planner.times.observe_round(clock, alone, bool(drafted), expected_ms)

    # --- answers --------------------------------------------------------------------------------------------

    def _apply(self, plan: PlannedSequence, verified: VerifiedItem, proposal: Proposal, break_even: float) -> None:
        """Commit one answer, unless its sequence ended or moved on meanwhile."""
        sequence = plan.sequence
        running = self.running.get(sequence.sequence_id)
        if running is None or verified.epoch != sequence.epoch:
            return
        if verified.fault is not None:
            running.emit(GenerationFailed(500, "sequence_fault", verified.fault))
            self._events.finished(running)
        elif verified.lost:
            sequence.target.restart()
        elif not plan.samples:
            chunk = sequence.read_by_target(plan.target_end, verified)
            sequence.target.suspicion.read(sequence.target.cached_tokens)
            self._emit(running, chunk)
        else:
            chunk = sequence.commit(verified, proposal)
            sequence.target.suspicion.read(sequence.target.cached_tokens)
            self._count(plan, running, verified, proposal, len(chunk.token_ids))
            note_committed(running, plan, proposal, verified, len(chunk.token_ids))
            self._emit(running, chunk)
            self._judge_drafter(plan, verified, proposal, break_even)

    def _count(
        self,
        plan: PlannedSequence,
        running: RunningSequence,
        verified: VerifiedItem,
        proposal: Proposal,
        committed: int,
    ) -> None:
        if not running.is_check:
            drafter = self._roster.get(plan.drafter_id or "")
            name = running.sequence.drafter_name if drafter is None else drafter.registration.name
            self._totals.metrics.verified(
                self.target.registration.name, name or "", plan.draft_tokens, proposal, verified, committed
            )
            drafted = len(proposal) or verified.looked_up
            self._totals.add_commit(drafted, min(verified.accepted, committed), committed)
            self._totals.add(looked_up_tokens=verified.looked_up)
            if verified.looked_up:
                traffic_class = running.sequence.request.traffic_class
                self._roster.observe_lookup(traffic_class, verified.looked_up, verified.accepted)

    def _judge_drafter(
        self, plan: PlannedSequence, verified: VerifiedItem, proposal: Proposal, break_even: float
    ) -> None:
        if not len(proposal) or plan.drafter_id is None:
            return
        benched = self._roster.observe_verification(
            plan.drafter_id,
            plan.sequence.request.traffic_class,
            proposal_depth(proposal),
            verified.accepted,
            break_even if self._config.bench_drafters else None,
        )
        if benched:
            self._events.drafter_benched(plan.drafter_id)

    def _emit(self, running: RunningSequence, chunk: TokenChunk | None) -> None:
        if chunk is not None:
            running.emit(chunk)
        if running.sequence.finish_reason is not None:
            self._events.finished(running)

    def _fail(self, members: list[RunningSequence], message: str) -> None:
        for running in members:
            if self.running.get(running.sequence.sequence_id) is running:
                running.emit(GenerationFailed(500, "internal_error", message))
                self._events.finished(running)
