"""A link to a worker in a thread of its own, so that a worker that sleeps does not hold up the router's event loop."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from workers.answering import Target, answer
from workers.emulated.timing import sleep_until
from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.messages import WorkerRequest, WorkerResponse

if TYPE_CHECKING:
    from workers.drafters.base import Drafter


class ThreadLink:
    """A link to `worker` in this process: a thread of its own handles messages one at a time, in the order sent.

    A message travels for `hop_ms`, and so does its answer; meanwhile the worker may work on others.
    """

    def __init__(self, worker: "Target | Drafter", hop_ms: float = 0.0) -> None:
        self._worker = worker
        self._hop_s = hop_ms / 1e3
        self._thread = ThreadPoolExecutor(1, "emulated worker")
        self._way_back = ThreadPoolExecutor(1, "emulated way back")
        self._closed = False

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`. What missed its deadline, or is cancelled, is worked on all the same."""
        if self._closed:
            raise LinkClosedError("the link is closed")
        travelling = self._thread.submit(self._answer, message, time.perf_counter() + self._hop_s)
        try:
            # Cancelling the future would take a message that waits out of the queue, and later ones build on it.
            async with asyncio.timeout(deadline_s):
                response, done_s = await asyncio.shield(asyncio.wrap_future(travelling))
                if self._hop_s:
                    await asyncio.wrap_future(self._way_back.submit(sleep_until, done_s + self._hop_s))
        except TimeoutError as error:
            raise DeadlineExceededError(f"no answer to {type(message).__name__} within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            if travelling.cancelled():
                raise LinkClosedError("the link was closed") from None
            raise
        except Exception as error:
            raise LinkError(f"the worker failed: {error!r}") from error
        return response

    def close(self) -> None:
        """Wait for the step that runs, and answer nothing any more."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._way_back.shutdown()

    def _answer(self, message: WorkerRequest, arrival_s: float) -> tuple[WorkerResponse | None, float]:
        if self._hop_s:
            sleep_until(arrival_s)
        return answer(self._worker, message), time.perf_counter()
