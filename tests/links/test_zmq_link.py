"""What a call over ZeroMQ comes to: answers, errors, deadlines, cancellation, order."""

import asyncio
import threading

import numpy as np
import pytest

from tests.limits import HANG_S
from tests.links.helpers import (
    KEYS,
    STATS,
    Gate,
    count,
    linked,
    raw_dealer,
    serving,
)
from workers.errors import DeadlineExceededError, LinkError
from workers.links.codec import decode_answer, encode_request
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    ReleaseRequest,
    StatsRequest,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
    token_ids,
)


def test_answers_come_back_with_their_arrays() -> None:
    async def run() -> None:
        with serving(count) as address:
            async with linked(address) as link:
                tokens = token_ids(list(range(50_000)))
                answer = await link.call(VerifyRequest((VerifyItem(1, 2, 0, tokens),)), HANG_S)
                assert isinstance(answer, VerifyResponse)
                np.testing.assert_array_equal(answer.items[0].token_ids, tokens)
                assert await link.call(StatsRequest(), HANG_S) == STATS
                assert await link.call(ReleaseRequest(None), HANG_S) is None

    asyncio.run(run())


def test_a_worker_can_listen_on_an_ipv6_address() -> None:
    async def run() -> None:
        try:
            server = ZmqServer("::1", count)
        except LinkError:
            pytest.skip("this machine has no IPv6")
        async with linked(server.admit(KEYS.public)) as link:
            assert await link.call(StatsRequest(), HANG_S) == STATS
        server.close()

    asyncio.run(run())


def test_what_the_worker_raises_is_a_link_error_with_its_words_and_the_link_goes_on() -> None:
    def broken(message: WorkerRequest) -> WorkerResponse | None:
        if isinstance(message, ReleaseRequest):
            raise ValueError("no such sequence")
        return STATS

    async def run() -> None:
        with serving(broken) as address:
            async with linked(address) as link:
                with pytest.raises(LinkError, match=r"^the worker failed: ValueError\('no such sequence'\)$") as raised:
                    await link.call(ReleaseRequest(None), HANG_S)
                assert type(raised.value) is LinkError
                assert await link.call(StatsRequest(), HANG_S) == STATS

    asyncio.run(run())


def test_an_answer_that_cannot_be_sent_is_a_link_error() -> None:
    async def run() -> None:
        with serving(lambda message: "done") as address:  # type: ignore[arg-type,return-value]
            async with linked(address) as link:
                with pytest.raises(LinkError, match=r"the worker failed: .*str"):
                    await link.call(StatsRequest(), HANG_S)

    asyncio.run(run())


def test_a_deadline_ends_the_wait_and_the_late_answer_is_dropped() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                with pytest.raises(DeadlineExceededError, match=r"no answer to ReleaseRequest within 0\.05 s"):
                    await link.call(ReleaseRequest((1,)), 0.05)
                later = asyncio.create_task(link.call(StatsRequest(), HANG_S))
                gate.open.set()
                assert await later == STATS
                assert await link.call(StatsRequest(), HANG_S) == STATS
        assert gate.handled == [ReleaseRequest((1,)), StatsRequest(), StatsRequest()]

    asyncio.run(run())


def test_a_cancelled_call_leaves_the_link_usable() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), HANG_S))
                await gate.is_entered()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                gate.open.set()
                assert await link.call(StatsRequest(), HANG_S) == STATS

    asyncio.run(run())


def test_a_thousand_calls_in_flight_are_handled_in_order_and_each_gets_its_own_answer() -> None:
    async def run() -> None:
        seen: list[int] = []
        first = threading.Event()

        def echo(message: WorkerRequest) -> WorkerResponse | None:
            assert isinstance(message, VerifyRequest)
            assert first.wait(HANG_S)
            seen.append(message.items[0].sequence_id)
            return count(message)

        with serving(echo) as address:
            async with linked(address) as link:
                requests = [VerifyRequest((VerifyItem(number, 0, 0, token_ids([number])),)) for number in range(1000)]
                calls = [asyncio.create_task(link.call(request, HANG_S)) for request in requests]
                await asyncio.sleep(0)
                first.set()
                answers = await asyncio.gather(*calls)
        assert seen == list(range(1000))
        for number, answer in enumerate(answers):
            assert isinstance(answer, VerifyResponse)
            assert (answer.items[0].sequence_id, answer.items[0].token_ids.tolist()) == (number, [number])

    asyncio.run(run())


def test_messages_older_than_one_that_was_answered_are_not_handled_any_more() -> None:
    async def run() -> list[WorkerRequest]:
        handled: list[WorkerRequest] = []

        def note(message: WorkerRequest) -> None:
            handled.append(message)

        with serving(note) as address:
            async with raw_dealer(address) as socket:
                for number in (1, 3, 2, 3, 4):
                    socket.send(encode_request(77, number, ReleaseRequest((number,))))
                socket.send(encode_request(78, 1, ReleaseRequest((100,))))
                answered = [decode_answer(await asyncio.to_thread(socket.recv)).number for _ in range(4)]
                assert answered == [1, 3, 4, 1]
        return handled

    assert asyncio.run(run()) == [ReleaseRequest((number,)) for number in (1, 3, 4, 100)]
