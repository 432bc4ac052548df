"""CurveZMQ keys, and who may come in: each side knows the other by its public key (ZeroMQ RFC 26 and 27)."""

import logging
import threading
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from workers.log_lines import FewOfAKind

logger = logging.getLogger(__name__)
logger.addFilter(FewOfAKind())
DOMAIN = b"leadout"
# Both sides tell each other this often that they are there, and take the other for gone after such a silence. The
# threads of ZeroMQ do it, so a long step is no silence.
HEARTBEAT_MS = 2_000
SILENCE_MS = 10_000
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
KEY_BYTES = 32
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85, as ZeroMQ's options take it. It lives in memory only."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "KeyPair":
        """Return a new key pair."""
        return cls(*zmq.curve_keypair())


def prepare(socket: "zmq.Socket[bytes]", keys: KeyPair) -> None:
    """Set what both sides have in common. Nothing is dropped silently: a full queue would look like a lost answer."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = SILENCE_MS
    socket.maxmsgsize = MAX_MESSAGE_BYTES


class Doorkeeper:
    """Answers the handshakes of a context's sockets, in a thread that ends with the context: admitted keys may enter.

    A thread of its own, so that nobody waits at the door for a step to end.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._admitted: set[bytes] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="zmq-doorkeeper", daemon=True)
        self._thread.start()

    def admit(self, public_key: bytes) -> None:
        """Let the owner of this key in from now on. Raises ValueError if it is not a key in Z85."""
        try:
            key = z85.decode(public_key)
        except KeyError as error:
            raise ValueError("a public key is Z85") from error
        if len(key) != KEY_BYTES:
            raise ValueError(f"a public key has {KEY_BYTES} bytes, not {len(key)}")
        self._admitted.add(key)

    def join(self) -> None:
        """Wait for the thread's end; the context must have been told to end."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._reply(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._socket.close()

    def _reply(self, question: list[bytes]) -> list[bytes]:
        """Answer version, request, domain, address, identity, mechanism and credentials; see RFC 27."""
        version, request, _, address, _, mechanism, *credentials = question
        if mechanism == b"CURVE" and credentials[0] in self._admitted:
            return [version, request, b"200", b"OK", b"", b""]
        logger.warning("refused a stranger from %s", address.decode(errors="replace"))
        return [version, request, b"400", b"unknown key", b"", b""]
