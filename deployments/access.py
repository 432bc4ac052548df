"""Who may ask, and how much at once: middleware in front of the application, before a body is read.

Plain ASGI: it hands messages on as they come, so streams stream and a client that leaves is noticed.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api_keys import ApiKey, matching_key
from deployments.http_errors import RETRY_AFTER_S, error_response
from workers.errors import OverloadedError, RequestError

# Probes and the description of the API tell nothing that needs a key.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/openapi.json"})
MAY_PASS = (429, 503)
EVERYBODY = ""


class UnauthorizedError(RequestError):
    """No API key, or none that is known. The message never repeats it."""

    status = 401
    code = "invalid_api_key"
    error_type = "invalid_request_error"


class BodyTimeoutError(RequestError):
    """The request's body did not arrive in time."""

    status = 408
    code = "request_timeout"
    error_type = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Without `keys` everybody is let in. `max_concurrent_per_key` is for each ingress process, and without keys for
    all its requests together; `body_timeout_s` counts from the request's head to the end of its body.
    """

    keys: tuple[ApiKey, ...] = ()
    max_concurrent_per_key: int | None = None
    body_timeout_s: float = 30.0


class AccessControl:
    """Lets a request through if its key is known and has room for one more, and its body arrives in time.

    `in_progress` counts the requests of each key that are being answered, streams to their end.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self.app = app
        self.rules = rules
        self.in_progress: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or refuse the request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _with_advice(send)
        if _path(scope) in PUBLIC_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            caller = self._caller(scope)
        except UnauthorizedError as error:
            response = error_response(error)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        receive = _within(receive, self.rules.body_timeout_s)
        # Only these have work done for them; whoever is at the limit may still look at models and status.
        if scope["method"] == "POST":
            await self._run_counted(caller, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> str:
        if not self.rules.keys:
            return EVERYBODY
        scheme, _, presented = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not presented.strip():
            raise UnauthorizedError("An API key is required: send it as `Authorization: Bearer KEY`.")
        key = matching_key(self.rules.keys, presented.strip())
        if key is None:
            raise UnauthorizedError("The API key is not known.")
        return key.name

    async def _run_counted(self, caller: str, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.rules.max_concurrent_per_key
        if limit is not None and self.in_progress[caller] >= limit:
            whose = "This API key has" if self.rules.keys else "The service has"
            error = OverloadedError(f"{whose} {limit} requests in progress, which is the limit.")
            error.code = "too_many_requests"
            await error_response(error)(scope, receive, send)
            return
        self.in_progress[caller] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_progress[caller] -= 1


def _path(scope: Scope) -> str:
    """Return the path below the prefix that the application is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def _with_advice(send: Send) -> Send:
    """Say when to try again on every refusal that may pass, whoever words it; end connections that drip."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if message["status"] in MAY_PASS:
                headers.setdefault("retry-after", str(RETRY_AFTER_S))
            if message["status"] == BodyTimeoutError.status:
                headers["connection"] = "close"
        await send(message)

    return sending


def _within(receive: Receive, timeout_s: float) -> Receive:
    """Let `receive` raise BodyTimeoutError where the body is not complete `timeout_s` from now."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    complete = False

    async def receiving() -> Message:
        nonlocal complete
        if complete:  # what follows is the client's going away, which may take as long as the answer
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise BodyTimeoutError(f"The body was not complete after {timeout_s:g} s.") from None
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return receiving
