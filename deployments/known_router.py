"""One of several routers as a process knows it that sends requests there: what it last said, if it answers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from deployments.generation import GenerationService, cancel_and_wait
from deployments.router_choice import RouterView
from workers.errors import RouterLostError, UnavailableError
from workers.messages import GenerationEvent, GenerationRequest, RouterStatus, WorkerRole
from workers.router.detached import detached_task

logger = logging.getLogger(__name__)
ASK_EVERY_S = 0.5
ANSWER_WITHIN_S = 1.5
"""A router that takes longer to say how it is gets no new requests while another one does not."""
LOST_AFTER_S = 5.0
"""One that has not answered for so long is given up by the requests that wait for it."""


class _WithoutTargetError(RouterLostError):
    """The router is there, and cannot go on with its requests."""


class KnownRouter:
    """The router called `name`, behind `service`. What is asked of it in passing belongs to no request."""

    def __init__(self, name: str, service: GenerationService) -> None:
        self.name = name
        self.service = service
        self.status: RouterStatus | None = None
        self._is_down = False
        self._in_flight = 0
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")
        self._answered_s = float("-inf")
        self._in_flight_then = 0

    @property
    def answers(self) -> bool:
        """Whether it has answered when it was asked last, or has a moment left to."""
        return self.status is not None and not self._is_late(ANSWER_WITHIN_S)

    @property
    def is_unknown(self) -> bool:
        """Whether it may be about to answer for the first time."""
        return self.status is None and not self._is_down

    @property
    def is_due(self) -> bool:
        """Whether what is known of it is old."""
        return time.monotonic() - self._asked_s > ASK_EVERY_S

    def view(self, patience_s: float = ANSWER_WITHIN_S) -> RouterView:
        """Return what is known of it; what this process has sent there since it answered counts."""
        status = self.status
        if status is None or self._is_late(patience_s):
            return RouterView(self.name, answers=False)
        drafters = {
            worker.registration.name for worker in status.workers if worker.registration.role is WorkerRole.DRAFT
        }
        since = self._in_flight - self._in_flight_then
        return RouterView(
            self.name,
            targets=0 if status.draining else status.open_targets,
            sequences=max(0, status.running + status.waiting + since),
            waiting=status.waiting,
            drafters=frozenset(drafters),
        )

    def ask(self) -> "asyncio.Task[None]":
        """Ask for its status, unless that is asked for already; what comes of it is noted when it comes."""
        if self._asking is not None and self._is_late(2 * LOST_AFTER_S):
            self._asking.cancel()
            self._asking = None
            self._note_down()
        if self._asking is None:
            self._asked_s = time.monotonic()
            self._asking = detached_task(self._ask())
        return self._asking

    async def generate(
        self, request: GenerationRequest, is_elsewhere: Callable[[], bool]
    ) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`. RouterLostError, too, while it does not even say how it is.

        And while it has no target, if one `is_elsewhere`.
        """
        self._in_flight += 1
        try:
            async with aclosing(self.service.generate(request)) as events:  # type: ignore[type-var]
                while (event := await self._next(events, is_elsewhere)) is not None:
                    yield event
        except _WithoutTargetError:
            raise
        except RouterLostError:
            self._note_down()
            raise
        finally:
            self._in_flight -= 1

    async def _next(
        self, events: AsyncIterator[GenerationEvent], is_elsewhere: Callable[[], bool]
    ) -> GenerationEvent | None:
        """Return the next event, None behind the last; while it does not come, look at how the router is.

        Serve keeps a call to a router that is not there until there is one again.
        """
        began_s = time.monotonic()
        waiting = asyncio.ensure_future(anext(events, None))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=ASK_EVERY_S)
                if not waiting.done():
                    self._check(began_s, is_elsewhere)
            return waiting.result()
        finally:
            await cancel_and_wait([waiting])

    def _check(self, began_s: float, is_elsewhere: Callable[[], bool]) -> None:
        if self.is_due:
            self.ask()
        if time.monotonic() - max(began_s, self._answered_s) > LOST_AFTER_S:
            raise RouterLostError(f"{self.name} has not answered for {LOST_AFTER_S:g} s")
        if self.answers and self.status is not None and self.status.open_targets == 0 and is_elsewhere():
            raise _WithoutTargetError(f"{self.name} has no target")

    async def _ask(self) -> None:
        in_flight = self._in_flight
        try:
            self.status = await self.service.status()
        except Exception as error:
            self._note_down()
            if not isinstance(error, UnavailableError):
                logger.exception("%s could not be asked how it is", self.name)
        else:
            self._is_down, self._answered_s, self._in_flight_then = False, time.monotonic(), in_flight
        finally:
            if self._asking is asyncio.current_task():
                self._asking = None

    def _note_down(self) -> None:
        self.status, self._is_down = None, True

    def _is_late(self, patience_s: float) -> bool:
        return self._asking is not None and time.monotonic() - self._asked_s > patience_s
