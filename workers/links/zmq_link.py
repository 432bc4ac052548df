"""The router's end of a ZeroMQ link."""

import asyncio
import itertools
import logging
import secrets
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from workers.errors import LinkClosedError, LinkError
from workers.links.base import deadline_exceeded
from workers.links.codec import Answer, decode_answer, encode_request
from workers.links.curve import KeyPair, prepare
from workers.log_lines import FewOfAKind
from workers.messages import LinkAddress, WorkerRequest, WorkerResponse

logger = logging.getLogger(__name__)
logger.addFilter(FewOfAKind())
RECONNECT_MS = 100
MAX_RECONNECT_MS = 2_000
_REFUSALS = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class ZmqLink:
    """A link over an encrypted ZeroMQ socket that connects, and connects again, by itself. For one event loop.

    The event loop watches the sockets' file descriptors itself: a message then takes no detour over a thread.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyPair, address: LinkAddress) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = address.endpoint
        self._id = secrets.randbits(63)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer | LinkClosedError]] = {}
        self._connected = asyncio.Event()
        self._lost_at = time.monotonic()
        self._refusal = ""
        self._socket = context.socket(zmq.DEALER)
        prepare(self._socket, keys)
        self._socket.curve_serverkey = address.public_key
        self._socket.ipv6 = "[" in address.endpoint
        # What was not sent when a connection broke shall not be sent over the next.
        self._socket.immediate = True
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.reconnect_ivl_max = MAX_RECONNECT_MS
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _REFUSALS
        )
        self._readers = {int(self._socket.fd): self._receive, int(self._monitor.fd): self._watch}
        self._socket.connect(address.endpoint)
        for descriptor, read in self._readers.items():
            self._loop.add_reader(descriptor, read)
            # A descriptor gives no sign until it is known that nothing is there.
            read()

    async def opened(self, timeout_s: float) -> None:
        """Return when the worker has been reached. Raises LinkClosedError when it is not in `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError as error:
            raise LinkClosedError(f"{self._endpoint}: {self._refusal or 'no connection'}") from error

    def lost_for_s(self) -> float:
        """Return for how many seconds the worker has been out of reach; 0 while it is connected."""
        return 0.0 if self._connected.is_set() else time.monotonic() - self._lost_at

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `Link.call`. An answer that comes after the deadline, or to a call that was cancelled, is dropped."""
        number = next(self._numbers)
        self._send(encode_request(self._id, number, message))
        answered: asyncio.Future[Answer | LinkClosedError] = self._loop.create_future()
        self._pending[number] = answered
        # Sending may have swallowed the signal that something arrived.
        self._receive()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await answered
        except TimeoutError as error:
            raise deadline_exceeded(message, deadline_s) from error
        finally:
            self._pending.pop(number, None)
        if isinstance(answer, LinkClosedError):
            raise answer
        return answer.result()

    def close(self) -> None:
        """Disconnect; calls that wait fail. Closing again does nothing."""
        if self._socket.closed:
            return
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._lose("the link was closed")

    def _send(self, frame: bytes) -> None:
        if not self._connected.is_set():
            raise LinkClosedError("the worker is not connected")
        try:
            # Asking for events makes a new connection known, which sending may put off.
            if not int(self._socket.events) & zmq.POLLOUT:
                raise LinkClosedError("the worker is not connected")
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise LinkClosedError(f"the worker cannot be reached: {error}") from error

    def _receive(self) -> None:
        """Hand out all answers that have arrived: the descriptor tells of news once, not of each."""
        while not self._socket.closed and int(self._socket.events) & zmq.POLLIN:
            frame = b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
            try:
                answer = decode_answer(frame)
            except LinkError as error:
                logger.warning("dropped %d bytes from %s: %s", len(frame), self._endpoint, error)
                continue
            waiting = self._pending.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _watch(self) -> None:
        """Follow connections as they come and go."""
        while not self._monitor.closed and int(self._monitor.events) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected.set()
            elif event == zmq.Event.DISCONNECTED:
                # Answers that came before the end count.
                self._receive()
                self._lose("the connection to the worker broke")
            else:
                self._refusal = "the worker refused the router's key"

    def _lose(self, reason: str) -> None:
        if self._connected.is_set():
            self._connected.clear()
            self._lost_at = time.monotonic()
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_result(LinkClosedError(reason))
