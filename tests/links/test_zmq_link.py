"""What a call over ZeroMQ comes to: answers, errors, deadlines, lost workers, strangers."""

import asyncio
import signal
import threading

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from tests.links.helpers import KEYS, OPEN_TIMEOUT_S, linked, raw_dealer, serving, worker_process
from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.links.codec import decode_answer, encode_request
from workers.links.curve import KeyPair
from workers.links.zmq_link import ZmqLink
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    LinkAddress,
    ReleaseRequest,
    StatsRequest,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
    WorkerStats,
    token_ids,
)

STATS = WorkerStats(0, 7, 7)
LONG_S = 30.0


def count(message: WorkerRequest) -> WorkerResponse | None:
    """Answer stats with fixed numbers, a verification with its own tokens, and a release with nothing."""
    match message:
        case StatsRequest():
            return STATS
        case VerifyRequest(items):
            return VerifyResponse(tuple(VerifiedItem(i.sequence_id, i.epoch, 0, i.committed) for i in items), 1.0, 1)
        case _:
            return None


def server_threads() -> set[threading.Thread]:
    """The threads of all servers in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("zmq-")}


class Gate:
    """A handler that answers a release when the test lets it, and anything else at once."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.handled: list[WorkerRequest] = []

    def __call__(self, message: WorkerRequest) -> WorkerResponse | None:
        self.handled.append(message)
        if isinstance(message, ReleaseRequest):
            self.entered.set()
            assert self.open.wait(LONG_S)
            return None
        return count(message)

    async def is_entered(self) -> None:
        """Wait until a release is being answered."""
        assert await asyncio.to_thread(self.entered.wait, LONG_S)


def test_answers_come_back_with_their_arrays() -> None:
    async def run() -> None:
        with serving(count) as address:
            async with linked(address) as link:
                tokens = token_ids(list(range(50_000)))
                answer = await link.call(VerifyRequest((VerifyItem(1, 2, 0, tokens),)), LONG_S)
                assert isinstance(answer, VerifyResponse)
                np.testing.assert_array_equal(answer.items[0].token_ids, tokens)
                assert await link.call(StatsRequest(), LONG_S) == STATS
                assert await link.call(ReleaseRequest(None), LONG_S) is None

    asyncio.run(run())


def test_a_worker_can_listen_on_an_ipv6_address() -> None:
    async def run() -> None:
        try:
            server = ZmqServer("::1", count)
        except LinkError:
            pytest.skip("this machine has no IPv6")
        async with linked(server.admit(KEYS.public)) as link:
            assert await link.call(StatsRequest(), LONG_S) == STATS
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
                    await link.call(ReleaseRequest(None), LONG_S)
                assert type(raised.value) is LinkError
                assert await link.call(StatsRequest(), LONG_S) == STATS

    asyncio.run(run())


def test_an_answer_that_cannot_be_sent_is_a_link_error() -> None:
    async def run() -> None:
        with serving(lambda message: "done") as address:  # type: ignore[arg-type,return-value]
            async with linked(address) as link:
                with pytest.raises(LinkError, match=r"the worker failed: .*str"):
                    await link.call(StatsRequest(), LONG_S)

    asyncio.run(run())


def test_a_deadline_ends_the_wait_and_the_late_answer_is_dropped() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                with pytest.raises(DeadlineExceededError, match=r"no answer to ReleaseRequest within 0\.05 s"):
                    await link.call(ReleaseRequest((1,)), 0.05)
                later = asyncio.create_task(link.call(StatsRequest(), LONG_S))
                gate.open.set()
                assert await later == STATS
                assert await link.call(StatsRequest(), LONG_S) == STATS
        assert gate.handled == [ReleaseRequest((1,)), StatsRequest(), StatsRequest()]

    asyncio.run(run())


def test_a_cancelled_call_leaves_the_link_usable() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), LONG_S))
                await gate.is_entered()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                gate.open.set()
                assert await link.call(StatsRequest(), LONG_S) == STATS

    asyncio.run(run())


def test_a_thousand_calls_in_flight_are_handled_in_order_and_each_gets_its_own_answer() -> None:
    async def run() -> None:
        seen: list[int] = []
        first = threading.Event()

        def echo(message: WorkerRequest) -> WorkerResponse | None:
            assert isinstance(message, VerifyRequest)
            assert first.wait(LONG_S)
            seen.append(message.items[0].sequence_id)
            return count(message)

        with serving(echo) as address:
            async with linked(address) as link:
                requests = [VerifyRequest((VerifyItem(number, 0, 0, token_ids([number])),)) for number in range(1000)]
                calls = [asyncio.create_task(link.call(request, LONG_S)) for request in requests]
                await asyncio.sleep(0)
                first.set()
                answers = await asyncio.gather(*calls)
        assert seen == list(range(1000))
        for number, answer in enumerate(answers):
            assert isinstance(answer, VerifyResponse)
            assert (answer.items[0].sequence_id, answer.items[0].token_ids.tolist()) == (number, [number])

    asyncio.run(run())


async def stop(process: asyncio.subprocess.Process) -> None:
    """Stop a process, and wait until all its threads are."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


def test_a_killed_worker_is_noticed_at_once() -> None:
    async def run() -> None:
        async with worker_process() as (address, process), linked(address) as link:
            assert await link.call(StatsRequest(), LONG_S) == STATS
            call = asyncio.create_task(link.call(ReleaseRequest((60_000,)), 600.0))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(LinkClosedError):
                await asyncio.wait_for(call, LONG_S)
            with pytest.raises(LinkClosedError):
                await link.call(StatsRequest(), LONG_S)
            assert link.lost_for_s() > 0

    asyncio.run(run())


def test_a_stopped_worker_is_a_deadline_and_answers_again_when_it_goes_on() -> None:
    async def run() -> None:
        async with worker_process() as (address, process), linked(address) as link:
            assert await link.call(StatsRequest(), LONG_S) == STATS
            await stop(process)
            with pytest.raises(DeadlineExceededError):
                await link.call(StatsRequest(), 0.3)
            process.send_signal(signal.SIGCONT)
            assert await link.call(StatsRequest(), LONG_S) == STATS

    asyncio.run(run())


def test_a_silent_worker_is_lost_before_a_long_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.links.curve.HEARTBEAT_MS", 100)
    monkeypatch.setattr("workers.links.curve.SILENCE_MS", 300)

    async def run() -> None:
        async with worker_process() as (address, process), linked(address) as link:
            assert await link.call(StatsRequest(), LONG_S) == STATS
            await stop(process)
            with pytest.raises(LinkClosedError):
                await asyncio.wait_for(link.call(StatsRequest(), 600.0), LONG_S)

    asyncio.run(run())


def test_a_long_step_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.links.curve.HEARTBEAT_MS", 50)
    monkeypatch.setattr("workers.links.curve.SILENCE_MS", 200)

    async def run() -> None:
        async with worker_process() as (address, _), linked(address) as link:
            assert await link.call(ReleaseRequest((1_000,)), LONG_S) is None

    asyncio.run(run())


def test_a_server_that_closes_finishes_its_step_and_fails_the_calls_behind() -> None:
    async def run() -> None:
        before, gate = server_threads(), Gate()
        server = ZmqServer("127.0.0.1", gate)
        async with linked(server.admit(KEYS.public)) as link:
            calls = [asyncio.create_task(link.call(ReleaseRequest((number,)), LONG_S)) for number in range(3)]
            await gate.is_entered()
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            await asyncio.sleep(0.05)
            gate.open.set()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            await closing
        assert all(isinstance(outcome, LinkClosedError) for outcome in outcomes[1:])
        assert gate.handled == [ReleaseRequest((0,))]
        assert server_threads() == before

    asyncio.run(run())


def test_closing_a_link_fails_its_calls_and_leaves_nothing_behind() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), LONG_S))
                await gate.is_entered()
                link.close()
                link.close()
                with pytest.raises(LinkClosedError):
                    await call
                with pytest.raises(LinkClosedError):
                    await link.call(StatsRequest(), LONG_S)
            gate.open.set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


class Relay:
    """A TCP relay in front of a server, which can break all its connections."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rsplit(":", 1)[1])
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.break_connections()

    def break_connections(self) -> None:
        """Cut every connection that there is now."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while chunk := await source.read(65536):
                sink.write(chunk)

        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)


def relayed(address: LinkAddress, relay: Relay) -> LinkAddress:
    """The worker's address by way of the relay."""
    return LinkAddress(relay.endpoint, address.public_key)


def test_a_broken_connection_fails_the_calls_and_the_next_one_works() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with Relay(address.endpoint) as relay, linked(relayed(address, relay)) as link:
                calls = [asyncio.create_task(link.call(ReleaseRequest((number,)), LONG_S)) for number in range(2)]
                await gate.is_entered()
                relay.break_connections()
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(outcome, LinkClosedError)
                await link.opened(OPEN_TIMEOUT_S)
                again = asyncio.create_task(link.call(StatsRequest(), LONG_S))
                await asyncio.sleep(0)
                gate.open.set()
                assert await again == STATS
                assert link.lost_for_s() == 0

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


def test_bytes_that_are_no_message_neither_crash_nor_stall_the_worker() -> None:
    async def run() -> None:
        with serving(count) as address:
            async with raw_dealer(address) as socket, linked(address) as link:
                for junk in (b"", b"junk", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000):
                    socket.send(junk)
                socket.send_multipart([b"a", b"b", b"c"])
                socket.send(msgspec.msgpack.encode((1, 1, "SystemRequest", {"command": "true"})))
                answer = decode_answer(await asyncio.to_thread(socket.recv))
                assert answer.number == 1
                with pytest.raises(LinkError, match="unknown message 'SystemRequest'"):
                    answer.result()
                assert await link.call(StatsRequest(), LONG_S) == STATS

    asyncio.run(run())


def test_a_stranger_is_refused_and_cannot_stall_the_worker() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), LONG_S))
                await gate.is_entered()
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                stranger = ZmqLink(context, KeyPair.generate(), address)
                plain = context.socket(zmq.DEALER)
                plain.linger = 0
                plain.connect(address.endpoint)
                plain.send(encode_request(1, 1, ReleaseRequest((99,))))
                with pytest.raises(LinkClosedError, match="refused the router's key"):
                    await stranger.opened(1.0)
                with pytest.raises(LinkClosedError):
                    await stranger.call(ReleaseRequest((98,)), LONG_S)
                _, writer = await asyncio.open_connection("127.0.0.1", int(address.endpoint.rsplit(":", 1)[1]))
                writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 10_000)
                await writer.drain()
                gate.open.set()
                assert await call is None
                assert await link.call(StatsRequest(), LONG_S) == STATS
                writer.close()
                stranger.close()
                plain.close()
                context.term()
        assert gate.handled == [ReleaseRequest((1,)), StatsRequest()]

    asyncio.run(run())


def test_a_worker_with_another_key_is_not_talked_to() -> None:
    async def run() -> None:
        with serving(count) as address:
            impostor = LinkAddress(address.endpoint, KeyPair.generate().public)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            link = ZmqLink(context, KEYS, impostor)
            with pytest.raises(LinkClosedError, match=r"tcp://127\.0\.0\.1"):
                await link.opened(0.5)
            link.close()
            context.term()

    asyncio.run(run())


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 40 + b"y" * 40, b"\xff" * 40])
def test_what_is_no_key_is_not_admitted(key: bytes) -> None:
    server = ZmqServer("127.0.0.1", count)
    with pytest.raises(ValueError, match=r".+"):
        server.admit(key)
    server.close()


def test_a_server_that_cannot_listen_says_so_and_leaves_nothing_behind() -> None:
    before = server_threads()
    with pytest.raises(LinkError, match=r"cannot listen on 192\.0\.2\.1"):
        ZmqServer("192.0.2.1", count)
    assert server_threads() == before
