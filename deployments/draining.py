"""Ending in good order: an ingress that drains finishes what it has begun, and begins nothing new.

Knows nothing of Ray. Whoever ends a process calls `Draining.begin` and then waits for `wait_until_idle`.
"""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http_errors import error_response
from workers.errors import UnavailableError


class Draining:
    """Whether this process is to end, and how many requests it still answers."""

    def __init__(self) -> None:
        self._begun = False
        self._in_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._begun

    @property
    def in_progress(self) -> int:
        """Requests that are being answered, streams to their end."""
        return self._in_progress

    def begin(self) -> None:
        """Refuse new requests from now on. There is no way back."""
        self._begun = True

    def check(self) -> None:
        """Raise UnavailableError if draining has begun; for /ready, so that traffic goes elsewhere."""
        if self._begun:
            raise UnavailableError("The service is about to stop and takes no new requests.")

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request is being answered; return whether that came about within `timeout_s`."""
        if self._idle.is_set():  # with no time left, `wait_for` would not even look
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def enter(self) -> Callable[[], None]:
        """Count one request, and return what is to be called at its end. UnavailableError if draining has begun."""
        self.check()
        self._in_progress += 1
        self._idle.clear()
        return self._leave

    def _leave(self) -> None:
        self._in_progress -= 1
        if self._in_progress == 0:
            self._idle.set()


class DrainGate:
    """Middleware: counts the requests that are answered, and refuses new ones with 503 once draining has begun.

    Only POST, which is what work is done for: probes and status are answered to the end.
    """

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self.app = app
        self.draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or refuse the request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            leave = self.draining.enter()
        except UnavailableError as error:
            response = error_response(error)
            response.headers["connection"] = "close"  # the next request had better open one to another process
            await response(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            leave()
