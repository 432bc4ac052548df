"""What clients say in headers: how long they will wait, and the trace that the request belongs to."""

import re
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from workers.errors import InvalidRequestError

TIMEOUT_HEADER = "x-request-timeout"
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,3})?")
TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request's headers say of it."""

    timeout_s: float
    trace_context: dict[str, str] = field(default_factory=dict)


def read_context(headers: Headers, longest_timeout_s: float) -> RequestContext:
    """Return what `headers` say; InvalidRequestError names a header that is wrong."""
    return RequestContext(_timeout_s(headers, longest_timeout_s), read_trace_context(headers))


def _timeout_s(headers: Headers, longest_s: float) -> float:
    """Return the client's time-out, or the longest one that the deployment allows."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    seconds = float(given) if SECONDS.fullmatch(given) else 0.0
    if not 0 < seconds <= longest_s:
        message = f"{TIMEOUT_HEADER}: must be a number of seconds above 0 and at most {longest_s:g}."
        raise InvalidRequestError(message, TIMEOUT_HEADER)
    return seconds


def read_trace_context(headers: Headers) -> dict[str, str]:
    """Return the client's W3C trace context, if it is well formed."""
    parent = headers.get("traceparent", "")
    if not TRACE_PARENT.fullmatch(parent):
        return {}
    state = headers.get("tracestate")
    return {"traceparent": parent} | ({"tracestate": state} if state else {})
