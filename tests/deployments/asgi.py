"""Talking to an ASGI application message by message: what arrives when, and what was never read."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request, whose body arrives as `parts`, `pause_s` before each; without `whole`, its end never comes.

    `read` counts the parts that the application took.
    """

    parts: Sequence[bytes] = (b"",)
    whole: bool = True
    pause_s: float = 0.0
    read: int = 0
    sent: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(
        self, app: Any, path: str, method: str = "POST", headers: dict[str, str] | None = None, root_path: str = ""
    ) -> "Exchange":
        """Let `app` answer; return this exchange."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": root_path + path,
            "raw_path": (root_path + path).encode(),
            "root_path": root_path,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self.read < len(self.parts):
            await asyncio.sleep(self.pause_s)
            part = self.parts[self.read]
            self.read += 1
            more = not self.whole or self.read < len(self.parts)
            return {"type": "http.request", "body": part, "more_body": more}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        """The status of the answer."""
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, names in lower case."""
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        """All of the answer that has been sent."""
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    def error(self, status: int) -> dict[str, Any]:
        """The error object of a refusal, after checking its shape."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"] == "application/json" and self.headers["x-request-id"]
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


async def until(condition: Callable[[], bool]) -> None:
    """Give other tasks the loop until `condition` holds; the caller's time-out ends what never does."""
    while not condition():
        await asyncio.sleep(0.001)
