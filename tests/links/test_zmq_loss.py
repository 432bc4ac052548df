"""What becomes of calls when worker, connection or link goes."""

import asyncio
import contextlib
import signal
import threading

import psutil
import pytest
import zmq

from tests.limits import HANG_S
from tests.links.helpers import (
    KEYS,
    STATS,
    Gate,
    count,
    linked,
    serving,
    worker_process,
)
from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.links.zmq_link import ZmqLink
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    LinkAddress,
    ReleaseRequest,
    StatsRequest,
)


def server_threads() -> set[threading.Thread]:
    """The threads of all servers in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("zmq-")}


async def stop(process: asyncio.subprocess.Process) -> None:
    """Stop a process, and wait until all its threads are."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


async def is_answered(link: ZmqLink) -> None:
    """Wait for an answer, over another connection where one is lost to a silence of this machine's own."""
    while True:
        with contextlib.suppress(LinkClosedError):
            await link.opened(HANG_S)
            assert await link.call(StatsRequest(), HANG_S) == STATS
            return


async def is_closing(server: ZmqServer) -> None:
    """Wait until the server's sockets have been told that their context ends."""
    while True:
        try:
            server._context.socket(zmq.PAIR).close()
        except zmq.ZMQError as error:
            if error.errno != zmq.ETERM:
                raise
            return
        await asyncio.sleep(0.001)


def test_a_killed_worker_is_noticed_at_once() -> None:
    async def run() -> None:
        async with worker_process() as (address, process), linked(address) as link:
            assert await link.call(StatsRequest(), HANG_S) == STATS
            call = asyncio.create_task(link.call(ReleaseRequest((60_000,)), 600.0))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(LinkClosedError):
                await asyncio.wait_for(call, HANG_S)
            with pytest.raises(LinkClosedError):
                await link.call(StatsRequest(), HANG_S)
            assert link.lost_for_s() > 0

    asyncio.run(run())


def test_a_stopped_worker_is_a_deadline_and_answers_again_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.links.curve.SILENCE_MS", int(HANG_S * 1000))

    async def run() -> None:
        async with worker_process() as (address, process), linked(address) as link:
            assert await link.call(StatsRequest(), HANG_S) == STATS
            await stop(process)
            with pytest.raises(DeadlineExceededError):
                await link.call(StatsRequest(), 0.3)
            process.send_signal(signal.SIGCONT)
            assert await link.call(StatsRequest(), HANG_S) == STATS

    asyncio.run(run())


def test_a_silent_worker_is_lost_before_a_long_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.links.curve.HEARTBEAT_MS", 100)
    monkeypatch.setattr("workers.links.curve.SILENCE_MS", 300)

    async def run() -> None:
        async with worker_process() as (address, process), linked(address) as link:
            await is_answered(link)
            await stop(process)
            with pytest.raises(LinkClosedError):
                await asyncio.wait_for(link.call(StatsRequest(), 600.0), HANG_S)

    asyncio.run(run())


def test_a_server_that_closes_finishes_its_step_and_fails_the_calls_behind() -> None:
    async def run() -> None:
        before, gate = server_threads(), Gate()
        server = ZmqServer("127.0.0.1", gate)
        async with linked(server.admit(KEYS.public)) as link:
            calls = [asyncio.create_task(link.call(ReleaseRequest((number,)), HANG_S)) for number in range(3)]
            await gate.is_entered()
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            await asyncio.wait_for(is_closing(server), HANG_S)
            await asyncio.sleep(0.05)  # a socket looks at what it was told once in a while
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
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), HANG_S))
                await gate.is_entered()
                link.close()
                link.close()
                with pytest.raises(LinkClosedError):
                    await call
                with pytest.raises(LinkClosedError):
                    await link.call(StatsRequest(), HANG_S)
            gate.open.set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


class Relay:
    """A TCP relay in front of a server, which can break all its connections; `signs` are what came from the server."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rsplit(":", 1)[1])
        self._writers: list[asyncio.StreamWriter] = []
        self.signs = 0

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
                self.signs += source is there
                sink.write(chunk)

        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)


def relayed(address: LinkAddress, relay: Relay) -> LinkAddress:
    """The worker's address by way of the relay."""
    return LinkAddress(relay.endpoint, address.public_key)


def test_a_long_step_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.links.curve.HEARTBEAT_MS", 20)
    monkeypatch.setattr("workers.links.curve.SILENCE_MS", int(HANG_S * 1000))

    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with Relay(address.endpoint) as relay, linked(relayed(address, relay)) as link:
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), HANG_S))
                await gate.is_entered()
                before = relay.signs
                # However long it takes: that one which does not come is a loss, another test shows.
                while relay.signs < before + 20:
                    await asyncio.sleep(0.01)
                assert not call.done() and link.lost_for_s() == 0
                gate.open.set()
                assert await call is None

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_broken_connection_fails_the_calls_and_the_next_one_works() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with Relay(address.endpoint) as relay, linked(relayed(address, relay)) as link:
                calls = [asyncio.create_task(link.call(ReleaseRequest((number,)), HANG_S)) for number in range(2)]
                await gate.is_entered()
                relay.break_connections()
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(outcome, LinkClosedError)
                await link.opened(HANG_S)
                again = asyncio.create_task(link.call(StatsRequest(), HANG_S))
                await asyncio.sleep(0)
                gate.open.set()
                assert await again == STATS
                assert link.lost_for_s() == 0

    asyncio.run(run())


def test_a_server_that_cannot_listen_says_so_and_leaves_nothing_behind() -> None:
    before = server_threads()
    with pytest.raises(LinkError, match=r"cannot listen on 192\.0\.2\.1"):
        ZmqServer("192.0.2.1", count)
    assert server_threads() == before
