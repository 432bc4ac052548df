"""A worker in its own thread answers in order, and neither it nor its way holds up the event loop."""

import asyncio
import threading
from collections.abc import Iterable

import pytest

from tests.limits import HANG_S
from tests.router.helpers import run_in_real_time
from workers.emulated.thread_link import ThreadLink
from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.messages import ReleaseRequest, StatsRequest, VerifyRequest, VerifyResponse, WorkerStats


class Gated:
    """A target whose steps wait for `gate`; the numbers of the sequences that it releases tell the order.

    `begun` is set when a release has begun.
    """

    def __init__(self) -> None:
        self.gate, self.begun, self.released = threading.Event(), threading.Event(), list[int]()

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Wait for the gate."""
        assert self.gate.wait(HANG_S)
        return VerifyResponse((), 1.0, 0)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Note the order."""
        self.begun.set()
        assert self.gate.wait(HANG_S)
        self.released += sequence_ids or ()

    def stats(self) -> WorkerStats:
        """Fail."""
        raise RuntimeError("no accounts")


@pytest.mark.parametrize("hop_ms", [0.0, 2.0])
def test_messages_are_answered_in_the_order_sent_while_the_loop_goes_on(hop_ms: float) -> None:
    async def body() -> None:
        worker = Gated()
        link = ThreadLink(worker, hop_ms)
        calls = [asyncio.create_task(link.call(ReleaseRequest((index,)), HANG_S)) for index in range(20)]
        await asyncio.sleep(0)
        worker.gate.set()
        finished = list[int]()
        for index, call in enumerate(calls):
            call.add_done_callback(lambda _, index=index: finished.append(index))
        await asyncio.gather(*calls)
        await asyncio.sleep(0)
        assert worker.released == finished == list(range(20))
        link.close()

    run_in_real_time(body)


def test_what_misses_its_deadline_or_is_cancelled_is_worked_on_all_the_same() -> None:
    async def body() -> None:
        worker = Gated()
        link = ThreadLink(worker)
        with pytest.raises(DeadlineExceededError, match="no answer to VerifyRequest within"):
            await link.call(VerifyRequest(()), 0.01)
        cancelled = asyncio.create_task(link.call(ReleaseRequest((1,)), HANG_S))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        worker.gate.set()
        await link.call(ReleaseRequest((2,)), HANG_S)
        assert worker.released == [1, 2]
        link.close()

    run_in_real_time(body)


def test_a_worker_that_fails_is_a_link_error_that_says_why() -> None:
    async def body() -> None:
        link = ThreadLink(Gated())
        with pytest.raises(LinkError, match="no accounts"):
            await link.call(StatsRequest(), HANG_S)
        link.close()

    run_in_real_time(body)


def test_a_closed_link_answers_nothing_and_fails_what_waits() -> None:
    async def body() -> None:
        worker = Gated()
        link = ThreadLink(worker)
        calls = [asyncio.create_task(link.call(ReleaseRequest((index,)), HANG_S)) for index in range(2)]
        assert await asyncio.to_thread(worker.begun.wait, HANG_S)
        closing = asyncio.create_task(asyncio.to_thread(link.close))
        await asyncio.wait([calls[1]])  # which only the closed link ends, while the gate is shut
        worker.gate.set()
        await closing
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[0] is None
        assert isinstance(answers[1], LinkClosedError)
        with pytest.raises(LinkClosedError):
            await link.call(StatsRequest(), HANG_S)

    run_in_real_time(body)
