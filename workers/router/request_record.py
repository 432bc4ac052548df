"""What is kept of each request: its timeline, its spans if it is sampled, and a line in the log when it ends."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from workers.messages import (
    NO_PROPOSAL,
    GenerationFailed,
    Proposal,
    Verification,
    VerifiedItem,
    VerifyResponse,
)
from workers.router.rounds import PlannedSequence
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.totals import RoundClock
from workers.telemetry.request_log import EndedRequest, RequestLog, ended_request
from workers.telemetry.sequence_trace import begin_trace
from workers.telemetry.timeline import Phase
from workers.telemetry.tracing import NO_TRACING, Tracing, trace_id_of


class RequestRecorder:
    """Keeps the record of clients' requests. `verification` is for requests that do not choose."""

    def __init__(
        self,
        verification: Verification = Verification.COUPLED,
        tracing: Tracing = NO_TRACING,
        log: RequestLog | None = None,
    ) -> None:
        self._verification = verification
        self._tracing = tracing
        self._log = log

    def begins(self, running: RunningSequence) -> None:
        """A client's request has come."""
        if self._tracing.tracer is None:
            return
        request = running.sequence.request
        attributes: dict[str, str | int | float | bool] = {
            "leadout.request.id": request.request_id,
            "leadout.speculation.enabled": request.speculation.enabled,
            "leadout.verification": str(request.speculation.verification or self._verification),
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
        running.sequence.trace = begin_trace(self._tracing, request.trace_context, running.timeline, attributes)

    def ends(self, running: RunningSequence) -> None:
        """The request is over: finished, failed, or its client has left."""
        if running.is_check:
            return
        now_s = time.perf_counter()
        running.timeline.end(now_s)
        sequence, failure = running.sequence, running.failure
        if sequence.trace is None and self._log is None:
            return
        ended = self._ended(running, failure)
        if sequence.trace is not None:
            sequence.trace.end(now_s, _sequence_attributes(ended), None if failure is None else failure.code)
        if self._log is not None:
            self._log.ended(self._with_text(ended, sequence, self._log))

    async def flush(self) -> None:
        """Export the spans that have ended."""
        if self._tracing.tracer is not None:
            await asyncio.to_thread(self._tracing.flush)

    @staticmethod
    def _ended(running: RunningSequence, failure: GenerationFailed | None) -> EndedRequest:
        sequence, request = running.sequence, running.sequence.request
        trace_id = trace_id_of(request.trace_context) if sequence.trace is None else sequence.trace.trace_id
        outcome = failure.code if failure is not None else str(sequence.finish_reason or "cancelled")
        tokens = len(request.prompt), sequence.length - len(request.prompt)
        return ended_request(request.request_id, outcome, tokens, sequence.usage(), running.timeline, trace_id)

    @staticmethod
    def _with_text(ended: EndedRequest, sequence: Sequence, log: RequestLog) -> EndedRequest:
        if log.decode is None:
            return ended
        prompt = sequence.request.prompt
        return replace(
            ended, prompt=log.text_of(prompt), answer=log.text_of(sequence.tokens(len(prompt), sequence.length))
        )


# --- between rounds -----------------------------------------------------------------------------------------


def note_placed(running: RunningSequence, target_id: str) -> None:
    """The sequence leaves the line: a target begins to read it."""
    now_s = time.perf_counter()
    running.timeline.enter(Phase.PREFILL, now_s)
    if (trace := running.sequence.trace) is not None:
        trace.enter("prefill", now_s)
        trace.event("placed", now_s, {"leadout.target": target_id, "leadout.drafter": _drafter(running.sequence)})


def note_preempted(running: RunningSequence) -> None:
    """The sequence has made room for older ones and is in the line again."""
    now_s = time.perf_counter()
    running.timeline.enter(Phase.QUEUE, now_s)
    if (trace := running.sequence.trace) is not None:
        trace.event("preemption", now_s, {"leadout.committed_tokens": running.sequence.length})
        trace.enter("queue", now_s)


def note_target_lost(running: RunningSequence, target_id: str) -> None:
    """The sequence's target is gone; it is in the line for another one."""
    now_s = time.perf_counter()
    running.timeline.enter(Phase.QUEUE, now_s)
    if (trace := running.sequence.trace) is not None:
        trace.failed(now_s, "target_failed")
        trace.event("failover", now_s, {"leadout.role": "target", "leadout.worker.id": target_id})
        trace.enter("queue", now_s)


def note_drafter_lost(running: RunningSequence, drafter_id: str) -> None:
    """The sequence's drafter is gone; it has another one by now, or goes on without."""
    if (trace := running.sequence.trace) is not None:
        name = "fallback" if running.sequence.drafter.worker_id is None else "failover"
        attributes = {"leadout.role": "draft", "leadout.worker.id": drafter_id}
        trace.event(name, time.perf_counter(), attributes | {"leadout.drafter": _drafter(running.sequence)})


# --- in a round: each costs a look at one attribute per sequence where nothing is traced --------------------


def note_drafting(planned: Iterable[PlannedSequence], clock: RoundClock) -> None:
    """A round begins."""
    for plan in planned:
        if (trace := plan.sequence.trace) is not None:
            attributes = _round_attributes(plan) | {"leadout.drafter": _drafter(plan.sequence)}
            trace.draft_begins(clock.began_s, plan.drafts, attributes)


def note_verifying(live: Iterable[PlannedSequence], proposals: Mapping[int, Proposal]) -> None:
    """Drafting has ended; what was drafted goes to the target next."""
    now_s = time.perf_counter()
    for plan in live:
        if (trace := plan.sequence.trace) is not None:
            proposal = proposals.get(plan.sequence.sequence_id, NO_PROPOSAL)
            attributes = _round_attributes(plan) | {
                "leadout.drafted_tokens": len(proposal),
                "leadout.verification": "coupled" if proposal.q is None else "ratio",
                "leadout.samples": plan.samples,
            }
            trace.verify_begins(now_s, len(proposal), attributes)


def note_verified(live: Iterable[PlannedSequence], response: VerifyResponse) -> None:
    """The target has answered for all that take part."""
    now_s = time.perf_counter()
    for plan, verified in zip(live, response.items, strict=True):
        # One that has moved on meanwhile may be in a round of another target by now.
        if (trace := plan.sequence.trace) is not None and plan.epoch == plan.sequence.epoch:
            attributes = {
                "leadout.accepted_tokens": verified.accepted,
                "leadout.looked_up_tokens": verified.looked_up,
                "leadout.reused_tokens": verified.reused_tokens,
            }
            trace.verified(now_s, attributes)


def note_committed(
    running: RunningSequence, plan: PlannedSequence, proposal: Proposal, verified: VerifiedItem, committed: int
) -> None:
    """So many tokens have become part of the sequence."""
    now_s, trace = time.perf_counter(), running.sequence.trace
    reads_prompt = running.timeline.phase is not Phase.DECODE
    is_first = running.timeline.committed(now_s)
    if trace is None:
        return
    drafted, accepted = len(proposal) or verified.looked_up, min(verified.accepted, committed)
    attributes = _round_attributes(plan) | {
        "leadout.drafted_tokens": drafted,
        "leadout.accepted_tokens": accepted,
        "leadout.rolled_back_tokens": drafted - accepted,
        "leadout.committed_tokens": committed,
    }
    trace.committed(now_s, attributes)
    if reads_prompt:
        trace.enter(None, now_s)
    if is_first:
        trace.event("first_token", now_s)


# --- attributes ---------------------------------------------------------------------------------------------


def _drafter(sequence: Sequence) -> str:
    return sequence.drafter.worker_id or "none"


def _round_attributes(plan: PlannedSequence) -> dict[str, str | int | float | bool]:
    """What all spans of a round say of it; `leadout.k` is the planned draft length."""
    return {"leadout.epoch": plan.epoch, "leadout.round": plan.sequence.verifications, "leadout.k": plan.draft_tokens}


def _sequence_attributes(ended: EndedRequest) -> dict[str, str | int | float | bool]:
    told: dict[str, str | int | float | bool | None] = {
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "leadout.outcome": ended.outcome,
        "leadout.cached_prompt_tokens": ended.cached_prompt_tokens,
        "leadout.verifications": ended.verifications,
        "leadout.drafted_tokens": ended.draft_tokens,
        "leadout.accepted_tokens": ended.accepted_tokens,
        "leadout.accepted_length": ended.accepted_length,
        "leadout.drafter": ended.drafter,
        "leadout.fallback_rounds": ended.fallback_rounds,
        "leadout.queue_ms": ended.queue_ms,
        "leadout.prefill_ms": ended.prefill_ms,
        "leadout.decode_ms": ended.decode_ms,
    }
    return {key: value for key, value in told.items() if value is not None}
