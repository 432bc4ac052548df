"""Which target and drafter a sequence has, and the line of those that wait for one."""

import asyncio
import bisect
import logging
import time
from collections.abc import Callable, Mapping

from workers.messages import GenerationFailed
from workers.router.config import RouterConfig
from workers.router.lane import Lane
from workers.router.peer import Peer
from workers.router.roster import Roster
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence
from workers.router.totals import TotalsCounter

logger = logging.getLogger(__name__)


def most_tokens(sequence: Sequence) -> int:
    """Return the most tokens of the sequence that a worker's KV can hold at once.

    Drafts never pass the request's token budget, so its last position bounds them too.
    """
    return sequence.length + sequence.remaining_tokens


class Placement:
    """Places sequences on the given workers, whose mappings their owner keeps up to date.

    The line is in the order of arrival. What is in service has arrived before all that never was, as nobody overtakes;
    so a sequence that lost its place comes before new ones, and among its like in their order.

    `make_room` puts off an online check, if one runs, and says whether it did; `give_up` ends a sequence whose time in
    the line is over.
    """

    def __init__(
        self,
        config: RouterConfig,
        lanes: Mapping[str, Lane],
        drafters: Roster,
        totals: TotalsCounter,
        make_room: Callable[[], bool],
        give_up: Callable[[RunningSequence], None],
    ) -> None:
        self.waiting: list[RunningSequence] = []
        self._config = config
        self._lanes = lanes
        self._drafters = drafters
        self._totals = totals
        self._make_room = make_room
        self._give_up = give_up

    def running(self) -> list[RunningSequence]:
        """Return the sequences that have a target."""
        return [running for lane in self._lanes.values() for running in lane.running.values()]

    def open_lanes(self) -> list[Lane]:
        """Return the lanes that take sequences."""
        return [lane for lane in self._lanes.values() if not lane.draining]

    # --- the line -------------------------------------------------------------------------------------------

    def line_up(self, running: RunningSequence, timed: bool = True) -> None:
        """Put a sequence in line for a target; if `timed`, for as long as the queue timeout allows."""
        bisect.insort(self.waiting, running, key=lambda other: other.age)
        if timed:
            self._start_clock(running)

    def start_clocks(self) -> None:
        """No target takes sequences: from now on everybody in line waits no longer than the queue timeout."""
        for running in self.waiting:
            if running.queue_timer is None:
                self._start_clock(running)

    def place_waiting(self) -> None:
        """Place waiting sequences in order; the first that finds no room holds the line, so nobody starves."""
        for running in self._line():
            if not self._place(running):
                return
            self.waiting.remove(running)

    def place_new(self, running: RunningSequence) -> bool:
        """Place a client's new sequence, if nobody waits before it."""
        return not self._line() and self._place(running)

    def is_too_large(self, sequence: Sequence) -> bool:
        """Whether there are targets, and none could hold the whole sequence even if it were alone."""
        most, lanes = most_tokens(sequence), self.open_lanes()
        return bool(lanes) and not any(lane.target.ledger.could_hold(most) for lane in lanes)

    def _line(self) -> list[RunningSequence]:
        """Those that wait for room. One too large for every target that is left waits for another target."""
        return [running for running in self.waiting if not self.is_too_large(running.sequence)]

    def _start_clock(self, running: RunningSequence) -> None:
        running.queue_timer = asyncio.get_running_loop().call_later(
            self._config.queue_timeout_s, self._out_of_patience, running
        )

    def _out_of_patience(self, running: RunningSequence) -> None:
        reason = "every target is busy" if self.open_lanes() else "no target is available"
        waited_s = self._config.queue_timeout_s
        running.emit(GenerationFailed(503, "service_unavailable", f"{reason} after {waited_s:g} s in the queue"))
        self._give_up(running)

    # --- targets and drafters -------------------------------------------------------------------------------

    def _place(self, running: RunningSequence) -> bool:
        """Place a client's sequence; a check that is in its way is put off."""
        return self.place_in_free_room(running) or (self._make_room() and self.place_in_free_room(running))

    def place_in_free_room(self, running: RunningSequence) -> bool:
        """Place the sequence on the target with fewest sequences that has room; False if none has."""
        if sum(len(lane.running) for lane in self._lanes.values()) >= self._config.max_running_sequences:
            return False
        lane = self._admitted_by(running.sequence)
        if lane is None:
            return False
        self._join(lane, running)
        return True

    def move(self, running: RunningSequence) -> bool:
        """Move the sequence to another target, where it resumes from its committed tokens; False if none has room.

        Answers on their way belong to an older epoch.
        """
        sequence = running.sequence
        lane = self._admitted_by(sequence)
        if lane is None:
            return False
        self._leave_all(sequence)
        self._join(lane, running)
        return True

    def _admitted_by(self, sequence: Sequence) -> Lane | None:
        """Reserve room for the sequence on the target with fewest sequences that has any."""
        most = most_tokens(sequence)
        for lane in sorted(self.open_lanes(), key=lambda lane: len(lane.running)):
            ledger = lane.target.ledger
            if ledger.could_hold(most) and ledger.admit(sequence.sequence_id, sequence.length, most):
                return lane
        return None

    def _join(self, lane: Lane, running: RunningSequence) -> None:
        self.assign_drafter(running, lane)
        sequence = running.sequence
        sequence.lookup_acceptance = self._drafters.lookup_estimate(sequence.request.traffic_class)
        if running.left_line_s is None and not running.is_check:
            self._totals.metrics.placed(time.monotonic() - running.admitted_s)
        running.leave_queue()
        lane.join(running)

    def assign_drafter(self, running: RunningSequence, lane: Lane | None = None) -> None:
        """Give the sequence the drafter that does best for such traffic, of those it accepts; none is not an error.

        One that has ended its drafters again and again gets no other.

        `lane` is the target that it is about to join; by default the one it is on.
        """
        sequence = running.sequence
        if not running.wants_drafts or sequence.drafter.worker_id or sequence.drafter.suspicion.is_proven:
            return
        for drafter in self._candidates(sequence, lane or self._lane_of(sequence)):
            if self._admit_at(drafter, sequence):
                self._assign(sequence, drafter)
                return

    def change_drafter(self, running: RunningSequence) -> None:
        """Move the sequence to another drafter that is of use and has room; otherwise it keeps the one it has."""
        sequence = running.sequence
        current = self._drafters.get(sequence.drafter.worker_id or "")
        for drafter in self._candidates(sequence, self._lane_of(sequence)):
            usable = drafter is not current and self._drafters.is_usable(drafter.worker_id)
            if usable and self._admit_at(drafter, sequence):
                if current is not None:
                    current.release(sequence.sequence_id)
                self._assign(sequence, drafter)
                return

    def _candidates(self, sequence: Sequence, lane: Lane | None) -> list[Peer]:
        """The drafters that the request accepts, best first.

        That is: of the chosen kind, in use, working least for other targets, with most room. Targets that share a
        drafter wait for each other's drafts, and it cannot draft ahead for any of them.
        """
        own = lane.running.keys() if lane else frozenset[int]()
        wanted = sequence.request.speculation.drafter
        accepted = [peer for peer in self._drafters.values() if wanted in (None, peer.registration.name)]
        usable = {peer.registration.name for peer in accepted if self._drafters.is_usable(peer.worker_id)}
        chosen = self._drafters.choice.choose(sequence.request.traffic_class, sorted(usable)) if usable else None
        return sorted(
            accepted,
            key=lambda peer: (
                peer.registration.name != chosen,
                not self._drafters.is_usable(peer.worker_id),
                len(peer.ledger.reserved.keys() - own),
                -peer.ledger.free_blocks,
            ),
        )

    @staticmethod
    def _admit_at(drafter: Peer, sequence: Sequence) -> bool:
        context = drafter.registration.context_length
        tokens, most = min(sequence.length, context), min(most_tokens(sequence), context)
        return drafter.ledger.admit(sequence.sequence_id, tokens, most)

    def _assign(self, sequence: Sequence, drafter: Peer) -> None:
        sequence.drafter.assign(drafter.worker_id)
        sequence.drafter_name = drafter.registration.name
        sequence.acceptance = self._drafters.sequence_estimate(drafter.worker_id, sequence.request.traffic_class)

    def assign_drafters(self) -> None:
        """Give every sequence that has a target and no drafter one, if there is room; those that came first first."""
        for running in sorted(self.running(), key=lambda running: running.age):
            self.assign_drafter(running)

    def preempt(self, running: RunningSequence) -> None:
        """Take a client's sequence off its target to make room for older ones; it is in line again, by its age.

        Its committed tokens stay. The next target reads them again, and answers on their way belong to an older epoch.
        No queue timeout runs while a target takes sequences: it was admitted already, and waits for those that make
        progress.
        """
        sequence = running.sequence
        logger.debug(
            "sequence %d makes room on target %s with %d of its tokens read",
            sequence.sequence_id,
            sequence.target.worker_id,
            sequence.target.cached_tokens,
        )
        self._leave_all(sequence)
        self._totals.add(preemptions=1)
        self.line_up(running, timed=not self.open_lanes())

    def take_out(self, running: RunningSequence) -> None:
        """Take the sequence out of service and free its KV everywhere."""
        running.ended = True
        running.leave_queue()
        if running in self.waiting:
            self.waiting.remove(running)
        self._leave_workers(running.sequence)

    def _lane_of(self, sequence: Sequence) -> Lane | None:
        return self._lanes.get(sequence.target.worker_id or "")

    def _leave_all(self, sequence: Sequence) -> None:
        """Leave target and drafter for others that know nothing of the sequence yet."""
        self._leave_workers(sequence)
        sequence.target.assign(None)
        sequence.drafter.assign(None)
        sequence.epoch += 1

    def _leave_workers(self, sequence: Sequence) -> None:
        if lane := self._lane_of(sequence):
            lane.leave(sequence.sequence_id)
            lane.target.release(sequence.sequence_id)
        if drafter := self._drafters.get(sequence.drafter.worker_id or ""):
            drafter.release(sequence.sequence_id)
            self.assign_drafters()
