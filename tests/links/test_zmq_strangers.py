"""Who may talk to a worker, and what bytes cannot do to it."""

import asyncio

import msgspec
import pytest
import zmq

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
from workers.errors import LinkClosedError, LinkError
from workers.links.codec import decode_answer, encode_request
from workers.links.curve import KeyPair
from workers.links.zmq_link import ZmqLink
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    LinkAddress,
    ReleaseRequest,
    StatsRequest,
)


async def is_refused(link: ZmqLink) -> None:
    """Wait until the worker has said no."""
    while not link._refusal:
        await asyncio.sleep(0.01)


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
                assert await link.call(StatsRequest(), HANG_S) == STATS

    asyncio.run(run())


def test_a_stranger_is_refused_and_cannot_stall_the_worker() -> None:
    async def run() -> None:
        gate = Gate()
        with serving(gate) as address:
            async with linked(address) as link:
                call = asyncio.create_task(link.call(ReleaseRequest((1,)), HANG_S))
                await gate.is_entered()
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                stranger = ZmqLink(context, KeyPair.generate(), address)
                plain = context.socket(zmq.DEALER)
                plain.linger = 0
                plain.connect(address.endpoint)
                plain.send(encode_request(1, 1, ReleaseRequest((99,))))
                await asyncio.wait_for(is_refused(stranger), HANG_S)
                with pytest.raises(LinkClosedError, match="refused the router's key"):
                    await stranger.opened(0.1)
                with pytest.raises(LinkClosedError):
                    await stranger.call(ReleaseRequest((98,)), HANG_S)
                _, writer = await asyncio.open_connection("127.0.0.1", int(address.endpoint.rsplit(":", 1)[1]))
                writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 10_000)
                await writer.drain()
                gate.open.set()
                assert await call is None
                assert await link.call(StatsRequest(), HANG_S) == STATS
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
