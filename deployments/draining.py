"""An ingress process that is told to stop: it refuses what is new, and lets what it has begun go on for its grace."""

import time
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http_errors import error_response
from workers.errors import RequestError
from workers.messages import GenerationEvent, GenerationFailed

DRAINING_MESSAGE = "The service is shutting down and takes no new requests."
# What is left of its time to a process whose requests are told to end.
FAREWELL_S = 5.0


class DrainingError(RequestError):
    """The service, or this part of it, is being stopped; another one may answer."""

    status = 503
    code = "draining"


class Drain:
    """Whether the process is being stopped, which `is_stopping` tells, and when the time of its requests is over.

    `timeout_s` is what it gets from being told to stop to being killed; its requests have a little less.
    """

    def __init__(
        self,
        is_stopping: Callable[[], bool] = lambda: False,
        timeout_s: float = 0.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_stopping = is_stopping
        self._grace_s = max(timeout_s - FAREWELL_S, timeout_s / 2)
        self._now_s = now_s
        self._began_s: float | None = None

    def has_begun(self) -> bool:
        """Whether the process was told to stop. There is no way back."""
        if self._began_s is None and self._is_stopping():
            self._began_s = self._now_s()
        return self._began_s is not None

    def is_over(self) -> bool:
        """Whether requests must end now, lest they are cut off without a word."""
        return self.has_begun() and self._began_s is not None and self._now_s() - self._began_s > self._grace_s

    async def until_over(self, events: AsyncIterator[GenerationEvent]) -> AsyncIterator[GenerationEvent]:
        """Yield the events of a sequence; when the time is over, a failure after the next one."""
        async for event in events:
            yield event
            if self.is_over():
                yield GenerationFailed(503, "draining", "the service was stopped before the answer was complete")
                return


class DrainGate:
    """Middleware that refuses new requests of a process that is being stopped. What can be looked at, still can."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or refuse the request."""
        if scope["type"] == "http" and scope["method"] == "POST" and self.drain.has_begun():
            await error_response(DrainingError(DRAINING_MESSAGE))(scope, receive, send)
            return
        await self.app(scope, receive, send)
