"""The rounds of one target: draft, verify, commit, for as long as it has sequences."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from workers.errors import LinkError
from workers.messages import (
    NO_PROPOSAL,
    GenerationFailed,
    Proposal,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    TokenChunk,
    VerifiedItem,
    VerifyResponse,
)
from workers.router.config import RouterConfig
from workers.router.draft_length import DraftLengthContext, DraftLengthPolicy
from workers.router.peer import Peer
from workers.router.prefill import PrefillLimits, StepTimes
from workers.router.rounds import PlannedSequence, apply_proposed, plan_round, propose_items, verify_request
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.totals import RoundClock, TotalsCounter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaneEvents:
    """What a lane tells its router: a sequence ended, or must make room; a worker failed."""

    finished: Callable[[RunningSequence], None]
    preempted: Callable[[RunningSequence], None]
    drafter_failed: Callable[[str, LinkError], None]
    target_failed: Callable[[str, LinkError], None]


class Lane:
    """Runs one cohort at a time on one target. Sequences join and leave between rounds."""

    def __init__(
        self,
        target: Peer,
        drafters: Mapping[str, Peer],
        config: RouterConfig,
        policy: DraftLengthPolicy,
        totals: TotalsCounter,
        events: LaneEvents,
    ) -> None:
        self.target = target
        self.running: dict[int, RunningSequence] = {}
        self._drafters = drafters
        self._config = config
        self._policy = policy
        self._totals = totals
        self._events = events
        self._work = asyncio.Event()
        self._step_times = StepTimes()
        self._prefill_limits = PrefillLimits(
            config.prefill_chunk_tokens, target.registration.block_tokens, config.prefill_latency_factor
        )

    def join(self, running: RunningSequence) -> None:
        """Let the sequence take part from the next round on."""
        running.sequence.target.assign(self.target.worker_id)
        self.running[running.sequence.sequence_id] = running
        self._work.set()

    def leave(self, sequence_id: int) -> None:
        """Take the sequence out; a round in progress drops its answer."""
        self.running.pop(sequence_id, None)

    async def run(self) -> None:
        """Run rounds until the target fails or the task is cancelled."""
        while True:
            if not self.running:
                self._work.clear()
                await self._work.wait()
            try:
                await self._round()
            except LinkError as error:
                self._events.target_failed(self.target.worker_id, error)
                return
            except Exception:
                # A fault of the router itself must not leave its sequences waiting for ever.
                logger.exception("round failed")
                self._fail_cohort("the router failed while running a round")

    async def _round(self) -> None:
        clock = RoundClock()
        planned = self._plan()
        proposals = await self._propose(planned, clock)
        await self.target.releases_sent()
        live = [plan for plan in planned if self._is_current(plan)]
        if not live:
            return
        for_clients = any(not self.running[plan.sequence.sequence_id].is_check for plan in live)
        request = verify_request(live, proposals)
        began = time.perf_counter()
        response = cast(VerifyResponse, await self.target.link.call(request, self._config.verify_deadline_s))
        clock.verified((time.perf_counter() - began) * 1e3, response.compute_ms)
        if response.read_tokens:
            self._step_times.observe(response.read_tokens, response.compute_ms)
        for plan, verified in zip(live, response.items, strict=True):
            self._apply(plan, verified, proposals.get(verified.sequence_id, NO_PROPOSAL))
        if for_clients:
            self._totals.add_round(clock)

    def _plan(self) -> list[PlannedSequence]:
        """The next round. Beside clients a check reads no more of its prompt than a drafted sequence adds to a step."""
        cohort, lengths = self._cohort(), self._draft_lengths()
        in_order = sorted(cohort, key=lambda running: running.age)
        clients = [running.sequence for running in in_order if not running.is_check]
        checks = [running.sequence for running in in_order if running.is_check]
        chunk_tokens = self._prompt_tokens(clients, lengths)
        check_tokens = min(self._config.max_draft_tokens + 1, chunk_tokens) if clients else chunk_tokens
        planned = plan_round(clients, lengths, chunk_tokens) + plan_round(checks, lengths, check_tokens)
        return self._with_blocks(planned)

    def _prompt_tokens(self, clients: list[Sequence], draft_lengths: dict[int, int]) -> int:
        """How many prompt tokens the step may read beside those of `clients` that decode."""
        decoding = [sequence for sequence in clients if sequence.length - sequence.target.cached_tokens == 1]
        if len(decoding) == len(clients):
            return self._config.prefill_chunk_tokens
        decoding_tokens = sum(1 + draft_lengths[sequence.sequence_id] for sequence in decoding)
        return self._prefill_limits.prompt_tokens(decoding_tokens, self._step_times.fit())

    def _with_blocks(self, planned: list[PlannedSequence]) -> list[PlannedSequence]:
        """Promise every sequence the blocks of its step. `planned` is in order of age, and so is the answer.

        Where blocks run out, the youngest sequence of the target gives up its own; the oldest therefore always goes on.
        Drafts get what is left: for them nobody has to go.
        """
        going_on = [plan for plan in planned if self._has_blocks(plan.sequence)]
        return [replace(plan, draft_tokens=self._drafts_that_fit(plan)) for plan in going_on]

    def _has_blocks(self, sequence: Sequence) -> bool:
        """Promise blocks for the tokens of the sequence. False if it had to make room, now or before."""
        while sequence.sequence_id in self.running:
            if self.target.ledger.extend(sequence.sequence_id, sequence.length, 0) is not None:
                return True
            self._events.preempted(max(self.running.values(), key=lambda running: running.age))
        return False

    def _drafts_that_fit(self, plan: PlannedSequence) -> int:
        granted = self.target.ledger.extend(plan.sequence.sequence_id, plan.sequence.length, plan.draft_tokens)
        return granted or 0

    def _is_current(self, plan: PlannedSequence) -> bool:
        """Whether the sequence still is as it was when the round was planned: it may have ended, or moved."""
        return plan.sequence.sequence_id in self.running and plan.epoch == plan.sequence.epoch

    def _cohort(self) -> list[RunningSequence]:
        """The sequences of the next round; more than fit take turns, those that waited longest first, checks last."""
        in_turn = sorted(self.running.values(), key=lambda running: running.is_check)
        chosen = in_turn[: self._config.max_batch_sequences]
        for running in chosen:
            self.running[running.sequence.sequence_id] = self.running.pop(running.sequence.sequence_id)
        return chosen

    def _draft_lengths(self) -> dict[int, int]:
        return {
            sequence_id: self._policy(
                DraftLengthContext(running.sequence.request.speculation.max_draft_tokens, self._config.max_draft_tokens)
            )
            if running.wants_drafts
            else 0
            for sequence_id, running in self.running.items()
        }

    async def _propose(self, planned: list[PlannedSequence], clock: RoundClock) -> dict[int, Proposal]:
        """Ask every drafter of the cohort at once; one that fails costs its sequences this round's drafts."""
        # Drafters come and go while the round waits; it deals with those of its beginning.
        drafters = dict(self._drafters)
        planned = [self._with_draft_blocks(plan, drafters) for plan in planned]
        contexts = {worker_id: drafter.registration.context_length for worker_id, drafter in drafters.items()}
        requests = propose_items(planned, contexts, self._config.prefill_chunk_tokens, self._config.verification)
        for plan in planned:
            if plan.draft_tokens > 0 and plan.sequence.drafter.worker_id not in contexts:
                plan.sequence.count_fallback_round()
        if not requests:
            return {}
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._ask(drafters[worker], request) for worker, request in requests.items()))
        clock.drafted(
            (time.perf_counter() - began) * 1e3, max((answer.compute_ms for answer in answers if answer), default=0.0)
        )
        plans = {plan.sequence.sequence_id: plan for plan in planned}
        items = {item.sequence_id: item for request in requests.values() for item in request.items}
        return {
            proposed.sequence_id: apply_proposed(plans[proposed.sequence_id], items[proposed.sequence_id], proposed)
            for worker_id, answer in zip(requests, answers, strict=True)
            if answer is not None
            for proposed in answer.items
            # A sequence that changed its drafter meanwhile has no use for what the old one has read.
            if plans[proposed.sequence_id].sequence.drafter.worker_id == worker_id
        }

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

    async def _ask(self, drafter: Peer, request: ProposeRequest) -> ProposeResponse | None:
        await drafter.releases_sent()
        # A sequence that left since the round was planned is released already; asking would start it again for ever.
        request = ProposeRequest(tuple(item for item in request.items if self._is_awaited(item)))
        try:
            return cast(ProposeResponse, await drafter.link.call(request, self._config.propose_deadline_s))
        except LinkError as error:
            if self._drafters.get(drafter.worker_id) is drafter:
                self._events.drafter_failed(drafter.worker_id, error)
            return None

    def _is_awaited(self, item: ProposeItem) -> bool:
        running = self.running.get(item.sequence_id)
        return running is not None and running.sequence.epoch == item.epoch

    def _apply(self, plan: PlannedSequence, verified: VerifiedItem, proposal: Proposal) -> None:
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
            self._emit(running, sequence.read_by_target(plan.target_end, verified))
        else:
            chunk = sequence.commit(verified, proposal)
            committed = len(chunk.token_ids)
            if not running.is_check:
                self._totals.add_commit(len(proposal), min(verified.accepted, committed), committed)
            running.target_failures = 0
            self._emit(running, chunk)

    def _emit(self, running: RunningSequence, chunk: TokenChunk | None) -> None:
        if chunk is not None:
            running.emit(chunk)
        if running.sequence.finish_reason is not None:
            self._events.finished(running)

    def _fail_cohort(self, message: str) -> None:
        for running in list(self.running.values()):
            running.emit(GenerationFailed(500, "internal_error", message))
            self._events.finished(running)
