"""An event loop that owns time: what a test waits for costs it nothing, and a machine that stalls changes nothing."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from unittest.mock import patch

from tests.limits import HANG_S

T = TypeVar("T")
TURN_S = 1e-5
"""What a turn of the loop takes, so that who waits by looking again and again lets time pass too."""
EPOCH_NS = 1_700_000_000 * 10**9
"""When virtual time begins, for clocks that count from 1970."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while nobody has anything to do, and then without waiting for it.

    `when_idle` is asked first whether it has something to do. Work in threads is waited for, in real time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.when_idle: Callable[[], bool] = lambda: False
        self._in_threads = 0
        self._ready: deque[Any]
        self._scheduled: list[Any]
        self._selector: Any

    def time(self) -> float:
        """The virtual time, seconds."""
        return self.now_s

    def time_ns(self) -> int:
        """The virtual time, nanoseconds since 1970."""
        return EPOCH_NS + round(self.now_s * 1e9)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> "asyncio.Future[Any]":
        """See `asyncio.AbstractEventLoop.run_in_executor`."""
        future = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._thread_is_back)
        return future

    def _thread_is_back(self, _: "asyncio.Future[Any]") -> None:
        self._in_threads -= 1

    def _run_once(self) -> None:
        self.now_s += TURN_S
        while not self._ready:
            timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            if timers and min(timers) <= self.now_s:
                break
            if self._in_threads:
                self.wait_for_threads()
            elif self.when_idle():
                continue
            elif timers:
                self.now_s = min(timers)
            else:
                self.wait_for_threads()
        super()._run_once()  # type: ignore[misc]

    def wait_for_threads(self) -> bool:
        """Wait until another thread calls back, which may be `when_idle` for threads that the loop does not know."""
        self._process_events(self._selector.select(HANG_S))  # type: ignore[attr-defined]
        assert self._ready, "nothing can happen any more"
        return True


def run_virtually(test: Callable[[VirtualLoop], Awaitable[T]]) -> T:
    """Run `test` in a loop of its own; every clock that the product looks at shows virtual time."""
    loop = VirtualLoop()
    with (
        patch.object(time, "monotonic", loop.time),
        patch.object(time, "perf_counter", loop.time),
        patch.object(time, "time_ns", loop.time_ns),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):

        async def body() -> T:
            return await test(loop)

        try:
            return runner.run(body())
        finally:
            loop.when_idle = lambda: False
