"""A client for completions that costs next to nothing: when each event came, and connections dropped at will.

It knows HTTP/1.1 as uvicorn speaks it, one request per connection.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS = "/v1/completions"
DATA, DONE = b"data: ", b"data: [DONE]\n"
LINE_LIMIT_BYTES = 2**22


class BrokenAnswerError(RuntimeError):
    """The connection ended within an answer, or a stream told of an error."""


@dataclass(slots=True)
class Answer:
    """What came of one request; times are seconds of the monotonic clock, which all processes of a machine share.

    `began_s` is before the connection is made. `chunks` are the parsed events of a stream, or the one body of a whole
    answer, and `chunk_s` when each came.
    """

    began_s: float
    sent_s: float
    status: int = 0
    head_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    chunk_s: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the first choice, if they were asked for."""
        return [token for chunk in self.chunks for token in _choice(chunk).get("token_ids", ())]

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended; None if it was cut off."""
        return next((_choice(chunk)["finish_reason"] for chunk in reversed(self.chunks) if chunk.get("choices")), None)


@contextlib.asynccontextmanager
async def connected(
    url: str, body: dict[str, Any], cut: bool = False
) -> AsyncIterator[tuple[Answer, asyncio.StreamReader]]:
    """Send `body`, or its first half; leaving the block closes the connection, whatever has come until then."""
    place, began_s = urlsplit(url), time.monotonic()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=LINE_LIMIT_BYTES)
    try:
        content = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + (content[: len(content) // 2] if cut else content))
        answer = Answer(began_s, time.monotonic())
        await writer.drain()
        yield answer, reader
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_head(answer: Answer, reader: asyncio.StreamReader) -> None:
    """Read the status and the headers."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError as error:
        raise BrokenAnswerError("the connection ended before an answer began") from error
    answer.head_s = time.monotonic()
    answer.status = int(lines[0].split(" ", 2)[1])
    answer.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}


async def chunks(answer: Answer, reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield what follows the head, event by event, or the whole body, and note it in `answer`."""
    if "content-length" in answer.headers:
        yield _note(answer, await reader.readexactly(int(answer.headers["content-length"])))
        return
    while size := int(await reader.readline() or b"0", 16):
        part = (await reader.readexactly(size + 2))[:-2]
        for line in part.splitlines(keepends=True):
            if line == DONE:
                return
            if line.startswith(DATA):
                yield _note(answer, line.removeprefix(DATA))
    raise BrokenAnswerError("a stream ended without [DONE]")


async def ask(url: str, body: dict[str, Any]) -> Answer:
    """Return the whole answer, streamed if `body` says so. BrokenAnswerError if it does not end well."""
    async with connected(url, body) as (answer, reader):
        await read_head(answer, reader)
        try:
            async for _ in chunks(answer, reader):
                pass
        except asyncio.IncompleteReadError as error:
            raise BrokenAnswerError("the connection ended within an answer") from error
    return answer


def _note(answer: Answer, text: bytes) -> dict[str, Any]:
    came_s = time.monotonic()
    chunk: dict[str, Any] = json.loads(text)
    if "error" in chunk and answer.status == 200:
        raise BrokenAnswerError(f"a stream ended with {chunk['error']}")
    answer.chunks.append(chunk)
    answer.chunk_s.append(came_s)
    return chunk


def _choice(chunk: dict[str, Any]) -> dict[str, Any]:
    return next((choice for choice in chunk.get("choices", ()) if choice["index"] == 0), {})
