"""How a real service is stopped: what runs may finish, what comes is refused, and a second Ctrl-C ends it at once."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.harness import Service, running_service, stop, tiny_pair_config
from tests.end_to_end.requests import TIMEOUT, body, stream
from tests.limits import HANG_S, wait_until

SLOW = {"emulated": {"base_ms": 40.0, "token_ms": 0.0}}


def interrupt(service: Service) -> None:
    """Press Ctrl-C."""
    service.process.send_signal(signal.SIGINT)


async def wait_for_line(service: Service, line: str) -> None:
    """Wait until the service has printed `line`."""
    while line not in service.log.read_text():
        await asyncio.sleep(0.05)


def test_ctrl_c_drains_and_a_second_one_ends_every_process() -> None:
    with running_service(tiny_pair_config(target=SLOW, speculation={"max_draft_tokens": 0})) as mine:
        pids = [pid for entry in mine.status()["workers"] for pid in entry["registration"]["process_ids"]]
        wait_until(lambda: "curl" in mine.log.read_text())

        async def code_of(client: httpx.AsyncClient, method: str, path: str, **content: Any) -> tuple[int, str | None]:
            answer = await client.request(method, path, **content)
            return answer.status_code, answer.json().get("error", {}).get("code")

        reasons: list[str | None] = []

        async def read_on(chunks: AsyncIterator[dict[str, Any]]) -> None:
            async for chunk in chunks:
                reasons.append(chunk["choices"][0]["finish_reason"])

        async def run() -> None:
            async with httpx.AsyncClient(base_url=mine.url, timeout=TIMEOUT) as client:
                # In 40 and in 4 s, so that both run when they are interrupted, and the long one still does then.
                long = stream(client, body("import re\n", {"seed": 2, "ignore_eos": True}, max_tokens=1000))
                short = stream(client, body("import os\n", {"seed": 1, "ignore_eos": True}, max_tokens=100))
                await anext(long)
                await anext(short)
                interrupt(mine)
                await wait_for_line(mine, "Draining: 2 requests still running")
                assert await code_of(client, "POST", "/v1/completions", json={"prompt": "a"}) == (503, "draining")
                assert await code_of(client, "GET", "/ready") == (503, "draining")
                assert await code_of(client, "GET", "/health") == (200, None)
                last = [chunk async for chunk in short][-1]
                assert last["choices"][0]["finish_reason"] == "length"
                interrupt(mine)
                with pytest.raises(AssertionError, match="shutting_down"):  # which `stream` makes of an error event
                    await read_on(long)
                assert not any(reasons)

        asyncio.run(asyncio.wait_for(run(), HANG_S))
        assert stop(mine.process) == 0
        log = mine.log.read_text()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert "Traceback" not in log
