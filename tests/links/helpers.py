"""Servers and links in one process, or in two."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import zmq

from benchmarks.harness import ROOT
from tests.limits import HANG_S
from workers.links.curve import KeyPair
from workers.links.zmq_link import ZmqLink
from workers.links.zmq_server import ZmqServer
from workers.messages import (
    LinkAddress,
    ReleaseRequest,
    StatsRequest,
    VerifiedItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
    WorkerStats,
)

STATS = WorkerStats(0, 7, 7)
KEYS = KeyPair.generate()
Handler = Callable[[WorkerRequest], WorkerResponse | None]


@contextlib.contextmanager
def serving(answer: Handler) -> Iterator[LinkAddress]:
    """A server that admits `KEYS`, closed at the end."""
    server = ZmqServer("127.0.0.1", answer)
    try:
        yield server.admit(KEYS.public)
    finally:
        server.close()


@contextlib.asynccontextmanager
async def linked(address: LinkAddress, keys: KeyPair = KEYS) -> AsyncIterator[ZmqLink]:
    """An open link with a context of its own; the context can only end if the link leaves no socket behind."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = ZmqLink(context, keys, address)
    try:
        await link.opened(HANG_S)
        yield link
    finally:
        link.close()
        context.term()


@contextlib.asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[LinkAddress, "asyncio.subprocess.Process"]]:
    """A process that runs `echo_worker`; it is killed at the end if it lives."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.links.echo_worker", KEYS.public.decode()),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        endpoint, key = (await process.stdout.readline()).split()
        yield LinkAddress(endpoint.decode(), key), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def raw_dealer(address: LinkAddress, keys: KeyPair = KEYS) -> AsyncIterator["zmq.Socket[bytes]"]:
    """A plain socket that connects as a router does and can send any bytes; receiving does not hang."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.curve_serverkey = address.public_key
    socket.linger = 0
    socket.rcvtimeo = int(HANG_S * 1000)
    socket.connect(address.endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def count(message: WorkerRequest) -> WorkerResponse | None:
    """Answer stats with fixed numbers, a verification with its own tokens, and a release with nothing."""
    match message:
        case StatsRequest():
            return STATS
        case VerifyRequest(items):
            return VerifyResponse(tuple(VerifiedItem(i.sequence_id, i.epoch, 0, i.committed) for i in items), 1.0, 1)
        case _:
            return None


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
            assert self.open.wait(HANG_S)
            return None
        return count(message)

    async def is_entered(self) -> None:
        """Wait until a release is being answered."""
        assert await asyncio.to_thread(self.entered.wait, HANG_S)
