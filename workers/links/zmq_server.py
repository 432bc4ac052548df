"""The worker's end of a ZeroMQ link: a thread that receives, lets the worker answer, and sends."""

import logging
import threading
from collections.abc import Callable

import zmq

from workers.errors import LinkError
from workers.links.codec import Request, decode_request, encode_answer, encode_failure
from workers.links.curve import DOMAIN, Doorkeeper, KeyPair, prepare
from workers.log_lines import FewOfAKind
from workers.messages import LinkAddress, WorkerRequest, WorkerResponse

logger = logging.getLogger(__name__)
logger.addFilter(FewOfAKind())
# How long a stranger may take to say who it is.
HANDSHAKE_MS = 10_000
# A worker meets one router at a time, and a new one when that was replaced.
MAX_REMEMBERED_LINKS = 64


class ZmqServer:
    """Listens on a free port of `host` and answers admitted routers with `answer`, one message at a time, in order.

    ZeroMQ's own thread keeps receiving while a message is answered. Raises LinkError if it cannot listen.
    """

    def __init__(self, host: str, answer: Callable[[WorkerRequest], WorkerResponse | None]) -> None:
        self._answer = answer
        self._last_numbers: dict[int, int] = {}
        keys = KeyPair.generate()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        prepare(self._socket, keys)
        self._socket.curve_server = True
        self._socket.zap_domain = DOMAIN
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a doorkeeper nobody enters
        self._doorkeeper = Doorkeeper(self._context)
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.ipv6 = ":" in host
        try:
            self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            self._doorkeeper.join()
            raise LinkError(f"cannot listen on {host}: {error}") from error
        self._address = LinkAddress(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), keys.public)
        self._thread = threading.Thread(target=self._run, name="zmq-server", daemon=True)
        self._thread.start()

    def admit(self, router_public_key: bytes) -> LinkAddress:
        """Let a router in and say where. Raises ValueError if that is no key."""
        self._doorkeeper.admit(router_public_key)
        return self._address

    def close(self) -> None:
        """Disconnect all routers and end the threads, after the message that is being answered."""
        self._context.term()
        self._thread.join()
        self._doorkeeper.join()

    def _run(self) -> None:
        try:
            while True:
                self._serve(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            self._socket.close()

    def _serve(self, frames: list[bytes]) -> None:
        """Answer what one admitted router sent. What cannot be read at all gets no answer: it has no number."""
        sender, *parts = frames
        try:
            request = decode_request(b"".join(parts))
        except LinkError as error:
            logger.warning("dropped %d bytes: %s", sum(map(len, parts)), error)
            return
        if self._is_stale(request):
            logger.warning("dropped %s from a connection that broke", request.kind[:64])
            return
        self._socket.send_multipart([sender, self._answered(request)])

    def _answered(self, request: Request) -> bytes:
        try:
            return encode_answer(request.number, self._answer(request.message()))
        except Exception as error:
            logger.exception("%s failed", request.kind[:64])
            return encode_failure(request.number, repr(error))

    def _is_stale(self, request: Request) -> bool:
        """Whether later messages of its link came first.

        Connections of a link are read in turn. What was left in one that broke could else undo what the router has
        begun anew over the next.
        """
        last = self._last_numbers.pop(request.link, 0)
        self._last_numbers[request.link] = max(last, request.number)
        while len(self._last_numbers) > MAX_REMEMBERED_LINKS:
            del self._last_numbers[next(iter(self._last_numbers))]
        return request.number <= last
