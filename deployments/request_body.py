"""The bodies of requests: bounded, strict JSON, always an object."""

import json
from typing import Any

from starlette.requests import Request

from deployments.http_errors import BodyTooLargeError
from workers.errors import InvalidRequestError

# All that reads a body after the parser must have stack left for it, templates and grammars included.
MAX_DEPTH = 128


async def read_json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """Return the body. BodyTooLargeError or InvalidRequestError."""
    return parse_json_object(await read_body(request, limit_bytes))


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the body; BodyTooLargeError as soon as it is known to exceed the limit."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    too_large = declared.isdecimal() and int(declared) > limit_bytes
    if not too_large:
        async for part in request.stream():
            body += part
            too_large = len(body) > limit_bytes
            if too_large:
                break
    if too_large:
        raise BodyTooLargeError(f"The body exceeds the limit of {limit_bytes} bytes.")
    return bytes(body)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse strict JSON: no NaN, no Infinity, no text that is not Unicode. InvalidRequestError otherwise."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if b"\\ud" in body.lower():  # an escape may be half of a surrogate pair, which no encoding can express
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _nests_beyond(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _nests_beyond(value: object, depth: int) -> bool:
    """Whether lists and objects stand within each other more than `depth` deep."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"The body is not valid JSON: it nests too deeply; {MAX_DEPTH} levels are allowed.")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")
