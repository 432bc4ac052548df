"""A sequence in service: what the client still waits for, and the queue its events go through."""

import asyncio
import time
from dataclasses import dataclass, field

from workers.messages import GenerationEvent, GenerationFailed
from workers.router.sequence import Sequence
from workers.telemetry.timeline import Timeline


@dataclass(slots=True)
class RunningSequence:
    """The sequence, its deadline on the monotonic clock, and events not yet taken by the ingress.

    `is_check`: it repeats a finished request on idle capacity; no client waits for it. `admitted_s`, `left_line_s`
    (for the first time) and `answered_s` (its latest tokens) are times of the monotonic clock. `failure` is what
    the client was told, if it was told of one.
    """

    sequence: Sequence
    deadline_s: float
    ended: bool = False
    is_check: bool = False
    queue_timer: asyncio.TimerHandle | None = None
    # Looked up when it is read: a test may own the clock.
    admitted_s: float = field(default_factory=lambda: time.monotonic())
    left_line_s: float | None = None
    answered_s: float | None = None
    timeline: Timeline = field(default_factory=Timeline)
    failure: GenerationFailed | None = None
    _events: asyncio.Queue[GenerationEvent] = field(default_factory=asyncio.Queue)

    @property
    def age(self) -> tuple[bool, int]:
        """Sorts by arrival: ids are given in its order. A check comes after all clients."""
        return self.is_check, self.sequence.sequence_id

    def leave_queue(self) -> None:
        """Stop the clock of the queue, if it runs: the sequence has a target now, or has ended."""
        self.left_line_s = self.left_line_s or time.monotonic()
        if self.queue_timer is not None:
            self.queue_timer.cancel()
            self.queue_timer = None

    @property
    def wants_drafts(self) -> bool:
        """Whether the request leaves speculation on."""
        return self.sequence.request.speculation.enabled

    def emit(self, event: GenerationEvent) -> None:
        """Queue an event for the client."""
        if isinstance(event, GenerationFailed):
            self.failure = self.failure or event
        self._events.put_nowait(event)

    async def next_event(self) -> GenerationEvent:
        """Return the next event, or the failure that says the request ran out of time."""
        try:
            # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with an event.
            async with asyncio.timeout(max(0.0, self.deadline_s - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            timeout_s = self.sequence.request.timeout_s
            self.failure = GenerationFailed(504, "timeout", f"the request did not finish within {timeout_s:g} s")
            return self.failure
