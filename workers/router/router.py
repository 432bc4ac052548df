"""The router: admits requests, places sequences on workers, moves them when a worker fails. No Ray."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.errors import ConfigurationError, LinkError, UnfitWorkerError
from workers.messages import (
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    MetricsSnapshot,
    ReleaseRequest,
    RouterLoad,
    RouterStatus,
    TokenIds,
    WorkerRegistration,
    WorkerReport,
    WorkerRole,
)
from workers.router.config import RouterConfig
from workers.router.detached import detached_task
from workers.router.draft_length import DraftLengthOptions, DraftLengthPolicy, draft_length_policy
from workers.router.draining import Draining
from workers.router.giving_up import GivingUp
from workers.router.lane import Lane, LaneEvents
from workers.router.load_meter import LoadMeter
from workers.router.metrics_recorder import MetricsRecorder
from workers.router.online_check import OnlineChecks
from workers.router.peer import CONTROL_DEADLINE_S, Peer
from workers.router.placement import Placement
from workers.router.request_record import RequestRecorder, note_drafter_lost, note_preempted, note_target_lost
from workers.router.request_watch import RequestWatch
from workers.router.roster import Roster
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.snapshot import SnapshotTaker
from workers.router.totals import TotalsCounter

if TYPE_CHECKING:
    from workers.links import Link

logger = logging.getLogger(__name__)
STATS_DEADLINE_S = 2.0
MOST_UNFIT = 1024


class Router:
    """Owns every sequence from admission to its last token."""

    def __init__(
        self,
        config: RouterConfig,
        make_detokenizer: Callable[[TokenIds], IncrementalDetokenizer],
        make_policy: Callable[[], DraftLengthPolicy] | None = None,
        recorder: RequestRecorder | None = None,
    ) -> None:
        self._config = config
        self._recorder = recorder or RequestRecorder()
        self._make_detokenizer = make_detokenizer
        options = DraftLengthOptions(fixed_groups=config.max_cohorts)
        self._make_policy = make_policy or partial(draft_length_policy, config.draft_length_policy, options)
        self._totals = TotalsCounter(
            MetricsRecorder(config.max_draft_tokens, looks_up=config.fallback == "prompt_lookup")
        )
        self._snapshots = SnapshotTaker(self._totals.metrics.store)
        self._load_meter = LoadMeter(config.load_window_s, time.monotonic)
        self._drafters = Roster()
        self._lanes: dict[str, Lane] = {}
        self._lane_tasks: dict[str, asyncio.Task[None]] = {}
        self._placement = Placement(
            config, self._lanes, self._drafters, self._totals, self._make_room, give_up=self._end
        )
        self._checks = OnlineChecks(config, self._place_check, self._placement.take_out, self._end)
        self._draining = Draining(self._lanes, self._placement, self._drop_drafter, self._make_room)
        self._giving_up = GivingUp(self._lanes)
        self._unfit: deque[str] = deque(maxlen=MOST_UNFIT)
        self._had_targets = False
        # Workers may still hold sequences of an earlier router; a random start keeps ids apart.
        self._next_sequence_id = secrets.randbits(48) << 14

    # --- workers --------------------------------------------------------------------------------------------

    async def register(self, registration: WorkerRegistration, link: "Link") -> None:
        """Take a worker into service; one that is known, or has drained, is left as it is.

        Raises ConfigurationError when its vocabulary differs from that of the workers in service, LinkError when it
        does not answer or has been found unfit.
        """
        if registration.worker_id in self._unfit:
            raise UnfitWorkerError("the worker has been found unfit and has to be replaced")
        if self._is_registered(registration):
            return
        await link.call(ReleaseRequest(None), CONTROL_DEADLINE_S)
        # Supervisors register again and again: another call may have been quicker while the worker was busy.
        if self._is_registered(registration):
            return
        peer = Peer(registration, link)
        self._totals.metrics.registered(registration)
        if registration.role is WorkerRole.DRAFT:
            self._drafters.add(peer)
            self._placement.assign_drafters()
        else:
            self._start_lane(peer)
        logger.info("registered %s worker %s (%s)", registration.role, registration.worker_id, registration.name)
        self._place_waiting()

    def drain(self, worker_id: str) -> int:
        """See `Draining.drain`; call again to go on, and unregister the worker when none is left or time is up."""
        return self._draining.drain(worker_id)

    def drain_service(self) -> int:
        """Refuse new requests from now on; return how many sequences of clients have not ended."""
        self._draining.service = True
        return self._clients_running() + len(self._placement.waiting)

    def unregister(self, worker_id: str) -> None:
        """Take a worker out of service; its sequences go on elsewhere."""
        if drafter := self._drafters.get(worker_id):
            drafter.under_way.blame()
            self._drop_drafter(worker_id)
        elif worker_id in self._lanes:
            self._drop_target(worker_id)

    # --- requests -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield what is committed for `request`, round by round; the last event is final.

        Closing the iterator cancels: both workers' KV is released at once.
        """
        watch = RequestWatch(self._totals.metrics, request)
        running = self._admit(request)
        if isinstance(running, GenerationFailed):
            watch.refused(running)
            yield running
            return
        try:
            while True:
                event = await running.next_event()
                watch.note(event)
                self._load_meter.observe(running, event)
                yield event
                if isinstance(event, GenerationFailed) or event.finish_reason is not None:
                    return
        finally:
            watch.end()
            self._end(running)

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """Return a snapshot. Asking the workers for their stats waits for their current step, 2 s at most."""
        peers = self._peers()
        if with_worker_stats:
            reports = await asyncio.gather(*(peer.report(STATS_DEADLINE_S) for peer in peers))
        else:
            reports = [WorkerReport(peer.registration, None) for peer in peers]
        return RouterStatus(
            self._clients_running(),
            len(self._placement.waiting),
            tuple(replace(report, draining=report.registration.worker_id in self._draining) for report in reports),
            self._totals.totals,
            online_check=self._checks.totals,
            drafters=self._drafters.reports(),
            loading=not self._had_targets,
            draining=self._draining.service,
        )

    def load(self) -> RouterLoad:
        """Return the load by which workers are scaled; asks nobody."""
        targets = [lane.target for lane in self._placement.open_lanes()]
        return self._load_meter.report(
            self._running(), self._placement.waiting, targets, self._drafters, self._totals.totals
        )

    async def metrics(self) -> MetricsSnapshot:
        """Return all metrics; the workers are asked for their stats, as for `status`."""
        return self._snapshots.take(await self.status(with_worker_stats=True))

    async def close(self) -> None:
        """Stop all rounds; sequences still in service end with an error."""
        self._checks.stop()
        for running in [*self._running(), *self._placement.waiting]:
            running.emit(GenerationFailed(503, "shutting_down", "the service is shutting down"))
        tasks = list(self._lane_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._recorder.flush()

    # --- admission and placement ----------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> RunningSequence | GenerationFailed:
        """Place the request or let it wait, or say why it can do neither."""
        if self._draining.service:
            return GenerationFailed(503, "draining", "the service is shutting down and takes no new requests")
        running = RunningSequence(self._new_sequence(request), deadline_s=time.monotonic() + request.timeout_s)
        self._recorder.begins(running)
        waiting = len(self._placement.waiting)
        if self._placement.is_too_large(running.sequence):
            return self._refuse(running, _too_large(request))
        if self._placement.place_new(running):
            return running
        if waiting >= self._config.max_waiting_sequences and request.resumption is None:
            failure = GenerationFailed(429, "overloaded", f"{waiting} sequences are waiting already")
            return self._refuse(running, failure)
        self._placement.line_up(running)
        return running

    def _refuse(self, running: RunningSequence, failure: GenerationFailed) -> GenerationFailed:
        running.failure = failure
        self._recorder.ends(running)
        return failure

    def _new_sequence(self, request: GenerationRequest) -> Sequence:
        self._next_sequence_id += 1
        return Sequence(self._next_sequence_id, request, self._make_detokenizer)

    def _place_waiting(self) -> None:
        self._placement.place_waiting()
        self._checks.start()

    def _place_check(self, request: GenerationRequest, deadline_s: float) -> RunningSequence | None:
        """Place a check, but only if nobody waits and a target has a row to spare in every round."""
        rows = self._config.max_batch_sequences
        if self._placement.waiting or all(len(lane.running) >= rows for lane in self._lanes.values()):
            return None
        running = RunningSequence(self._new_sequence(request), deadline_s, is_check=True)
        return running if self._placement.place_in_free_room(running) else None

    def _make_room(self) -> bool:
        return self._checks.make_room()

    def _on_preempted(self, running: RunningSequence) -> None:
        """A target has no blocks left for an older sequence: its youngest one goes, an online check before any."""
        if running.is_check:
            if not self._make_room():
                self._placement.take_out(running)
            return
        self._placement.preempt(running)
        note_preempted(running)
        # Another target may have room.
        self._placement.place_waiting()

    def _end(self, running: RunningSequence) -> None:
        """Take the sequence out of service and let others have its room; once is enough."""
        if running.ended:
            return
        self._placement.take_out(running)
        self._recorder.ends(running)
        self._checks.offer(running)
        self._place_waiting()

    # --- failure --------------------------------------------------------------------------------------------

    def _start_lane(self, target: Peer) -> None:
        events = LaneEvents(
            self._end, self._on_preempted, self._on_drafter_failed, self._on_drafter_benched, self._on_target_failed
        )
        self._had_targets = True
        lane = Lane(target, self._drafters, self._config, self._make_policy(), self._totals, events)
        self._lanes[target.worker_id] = lane
        self._lane_tasks[target.worker_id] = detached_task(lane.run())

    def _on_drafter_failed(self, worker_id: str, error: LinkError) -> None:
        logger.warning("drafter %s failed: %s", worker_id, error)
        self._totals.metrics.failed(WorkerRole.DRAFT)
        self._drafters[worker_id].under_way.blame()
        self._drop_drafter(worker_id)

    def _on_drafter_benched(self, worker_id: str) -> None:
        """Too few of the drafter's tokens are accepted: its sequences move, if there is another one for them."""
        logger.warning("drafter %s is benched: its drafts cost more than they bring", worker_id)
        self._totals.metrics.benched(self._drafters[worker_id].registration.name)
        for running in self._running():
            if running.sequence.drafter.worker_id == worker_id:
                self._placement.change_drafter(running)

    def _on_target_failed(self, worker_id: str, error: LinkError) -> None:
        logger.warning("target %s failed: %s", worker_id, error)
        self._totals.metrics.failed(WorkerRole.TARGET)
        if isinstance(error, UnfitWorkerError):
            self._unfit.append(worker_id)
        self._drop_target(worker_id)

    def _drop_drafter(self, worker_id: str) -> None:
        """Move the drafter's sequences to another drafter, or let them decode plainly."""
        if not self._drafters.remove(worker_id):
            return
        # A sequence that waits for its next target keeps its drafter meanwhile.
        for running in [*self._running(), *self._placement.waiting]:
            if running.sequence.drafter.worker_id == worker_id:
                running.sequence.drafter.assign(None)
                self._placement.assign_drafter(running)
                note_drafter_lost(running, worker_id)

    def _drop_target(self, worker_id: str) -> None:
        """Put the target's sequences first in line again; they resume from their committed tokens."""
        lane = self._lanes.pop(worker_id, None)
        if lane is None:
            return
        task = self._lane_tasks.pop(worker_id)
        if task is not asyncio.current_task():
            task.cancel()
        if not lane.draining:
            self._giving_up.target_failed(lane)
        moved = list(lane.running.values())
        lane.running.clear()
        failed = []
        for running in moved:
            running.sequence.target.assign(None)
            running.sequence.epoch += 1
            note_target_lost(running, worker_id)
            failure = self._giving_up.reason(running)
            if failure is None:
                self._placement.line_up(running)
            else:
                running.emit(failure)
                failed.append(running)
        for running in failed:
            self._end(running)
        if not self._placement.open_lanes():
            self._placement.start_clocks()
        self._place_waiting()

    # --- helpers --------------------------------------------------------------------------------------------

    def _is_registered(self, registration: WorkerRegistration) -> bool:
        """Whether the worker is, or was, in service. Raises ConfigurationError if it cannot serve beside the others."""
        worker_id = registration.worker_id
        if worker_id in self._drafters or worker_id in self._lanes or worker_id in self._draining:
            return True
        for peer in self._peers():
            if peer.registration.vocabulary_size != registration.vocabulary_size:
                raise ConfigurationError(
                    f"{registration.name} has {registration.vocabulary_size} token ids, "
                    f"{peer.registration.name} has {peer.registration.vocabulary_size}"
                )
        return False

    def _peers(self) -> list[Peer]:
        return [*(lane.target for lane in self._lanes.values()), *self._drafters.values()]

    def _running(self) -> list[RunningSequence]:
        return self._placement.running()

    def _clients_running(self) -> int:
        return sum(not running.is_check for running in self._running())


def _too_large(request: GenerationRequest) -> GenerationFailed:
    tokens = len(request.prompt) + request.stop.max_tokens
    return GenerationFailed(400, "context_length_exceeded", f"no target has KV blocks for {tokens} tokens")
