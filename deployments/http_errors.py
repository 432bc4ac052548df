"""Errors as clients see them: OpenAI's error objects for everything that can go wrong, and an id on every response."""

import json
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.errors import InvalidRequestError, RequestError

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
# OpenAI's limits of a client's own request id.
MAX_REQUEST_ID_CHARACTERS = 512
RETRY_AFTER_S = 1
POISON_REQUEST = "poison_request"
# nginx's code for a client that closed the connection; nobody is left to read it but the access log.
CLIENT_CLOSED_REQUEST = 499


class BodyTooLargeError(InvalidRequestError):
    """The request's body exceeds the deployment's limit."""

    status = 413
    code = "request_too_large"


class RoutingError(RequestError):
    """No such path, or a method that it does not have."""

    error_type = "invalid_request_error"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = {404: "not_found", 405: "method_not_allowed"}.get(status)


def error_body(error: RequestError) -> dict[str, dict[str, str | None]]:
    """Return OpenAI's error object."""
    return {
        "error": {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}
    }  # fmt: skip


def error_response(error: RequestError) -> JSONResponse:
    """Return the response for `error`; one that may pass says when to try again, one that does harm not to."""
    response = AsciiJSONResponse(error_body(error), error.status)
    if error.status in (429, 503):
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    if error.code == POISON_REQUEST:
        # OpenAI's clients send failed requests again, unless this header says no.
        response.headers["x-should-retry"] = "false"
    return response


def error_of_unexpected() -> RequestError:
    """Return what a client may know of an error that nobody expected; the rest belongs in the log."""
    error = RequestError("The server failed to answer; the error has been logged.")
    error.code = "internal_error"
    return error


class AsciiJSONResponse(JSONResponse):
    """JSON with escapes, because messages repeat what clients sent and that need not be valid Unicode."""

    def render(self, content: object) -> bytes:
        """Encode `content`."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


async def _answer_request_error(request: Request, error: RequestError) -> Response:
    return error_response(error)


async def _answer_http_exception(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(RoutingError(message, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _answer_nobody(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    RequestError: _answer_request_error,
    HTTPException: _answer_http_exception,
    ClientDisconnect: _answer_nobody,
}


class ErrorBoundary:
    """Outermost middleware: puts `x-request-id` on every response and answers unexpected errors with a plain 500.

    Starlette's own handler of unexpected errors stands outside of all middleware and re-raises. Without
    `names_requests` the header is left to a proxy that adds it, as Ray Serve's does: it must not be there twice.
    """

    def __init__(self, app: ASGIApp, names_requests: bool = True) -> None:
        self.app = app
        self.names_requests = names_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        acceptable = given is None or _is_acceptable(given)
        request_id = given if given is not None and acceptable else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self.names_requests:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            if not acceptable:
                await error_response(_REFUSED_ID)(scope, receive, send_with_id)
                return
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed unexpectedly", request_id)
            if started:
                raise
            await error_response(error_of_unexpected())(scope, receive, send_with_id)


_REFUSED_ID = InvalidRequestError(
    f"{REQUEST_ID_HEADER}: must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters.", REQUEST_ID_HEADER
)


def _is_acceptable(request_id: str) -> bool:
    """Whether a client's id can be put into a header and a log line."""
    return 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()
