"""Fault injection: a link that loses, holds back or doubles messages on purpose. Off unless the environment asks.

`LEADOUT_INJECT_LINK_FAULTS` names a JSON file, which a failure drill writes and changes while the service runs:

    {"drop": 0.1, "delay": 0.1, "double": 0.1, "delay_s": 0.5, "seed": 7, "until": 1790000000.0}

The first three are shares of the messages (0 to 1), `until` is when the faults end, in seconds since 1970.
"""

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from workers.links.base import Link, deadline_exceeded
from workers.messages import WorkerRequest, WorkerResponse

if TYPE_CHECKING:
    Calling = asyncio.Task[WorkerResponse | None]

logger = logging.getLogger(__name__)
INJECTION_VARIABLE = "LEADOUT_INJECT_LINK_FAULTS"


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """What happens to messages until the time `until`. A fault hits a share of them: 0 none, 1 all.

    `drop`: the question is lost, or its answer after the worker has done the work, one as often as the other. `delay`:
    the answer comes `delay_s` seconds later, or too late. `double`: the worker gets the question twice.
    """

    drop: float = 0.0
    delay: float = 0.0
    double: float = 0.0
    delay_s: float = 0.5
    seed: int = 0
    until: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "LinkFaults":
        """Return what the file says; no faults where there is no file, or none that can be read."""
        try:
            told = json.loads(path.read_text())
            return cls(**{field.name: told[field.name] for field in fields(cls) if field.name in told})
        except (OSError, ValueError, TypeError):
            return cls()


class FaultInjector:
    """Decides what befalls each message; all links of a router share one. Its file is looked at for every message."""

    def __init__(self, read: Callable[[], LinkFaults], now_s: Callable[[], float] = time.time) -> None:
        self._read = read
        self._now_s = now_s
        self._chance = random.Random(0)
        self._seed = 0

    def next_fault(self) -> tuple[str, LinkFaults]:
        """Return the kind of the next message's fault, or "", and the faults in force."""
        faults = self._read()
        if self._now_s() >= faults.until:
            return "", faults
        if faults.seed != self._seed:
            self._seed, self._chance = faults.seed, random.Random(faults.seed)
        drawn = self._chance.random()
        shares = (
            ("question lost", faults.drop / 2),
            ("answer lost", faults.drop / 2),
            ("delay", faults.delay),
            ("double", faults.double),
        )
        for kind, share in shares:
            if drawn < share:
                return kind, faults
            drawn -= share
        return "", faults


class FaultyLink:
    """A link that may lose, delay or double what is sent over `link`, as `injector` says."""

    def __init__(self, link: Link, injector: FaultInjector) -> None:
        self._link = link
        self._injector = injector
        self._doubles: set[Calling] = set()

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `Link.call`."""
        kind, faults = self._injector.next_fault()
        if not kind:
            return await self._link.call(message, deadline_s)
        logger.warning("fault injection: %s, %s", type(message).__name__, kind)
        if kind == "question lost":
            await asyncio.sleep(deadline_s)
            raise deadline_exceeded(message, deadline_s)
        if kind == "double":
            return await self._twice(message, deadline_s)
        deadline = asyncio.get_running_loop().time() + deadline_s
        answer = await self._link.call(message, deadline_s)
        left_s = deadline - asyncio.get_running_loop().time()
        if kind == "answer lost" or faults.delay_s > left_s:
            await asyncio.sleep(max(0.0, left_s))
            raise deadline_exceeded(message, deadline_s)
        await asyncio.sleep(faults.delay_s)
        return answer

    async def _twice(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """Send the message, and once more right behind it; the second answer is nobody's."""
        # The task begins when this call waits, which is when its own message has been sent.
        double = asyncio.get_running_loop().create_task(self._link.call(message, deadline_s))
        self._doubles.add(double)
        double.add_done_callback(self._forget)
        return await self._link.call(message, deadline_s)

    def _forget(self, double: "Calling") -> None:
        self._doubles.discard(double)
        if not double.cancelled():
            double.exception()  # else asyncio complains that nobody looked at it


def injector_from(environment: Mapping[str, str] = os.environ) -> FaultInjector | None:
    """Return the injector that the environment asks for; None if it asks for none."""
    path = environment.get(INJECTION_VARIABLE)
    if not path:
        return None
    logger.warning("%s is set: messages to workers may be lost, delayed or doubled on purpose", INJECTION_VARIABLE)
    return FaultInjector(lambda: LinkFaults.read(Path(path)))
