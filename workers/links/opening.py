"""Which link reaches which worker: opened when the worker registers, kept as long as it serves."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import zmq
from ray.exceptions import RayActorError, RayTaskError

from workers.errors import ConfigurationError, LinkClosedError, LinkError
from workers.links.base import Link, LinkChoice, LinkKind
from workers.links.curve import KeyPair
from workers.links.faulty import FaultyLink, injector_from
from workers.links.ray_link import RayLink
from workers.links.zmq_link import ZmqLink

logger = logging.getLogger(__name__)
# Together less than what a supervisor grants a registration beyond the router's own message.
OPEN_TIMEOUT_S = 3.5
RECONNECT_TIMEOUT_S = 1.0
FORGET_AFTER_S = 60.0


@dataclass(slots=True)
class _Entry:
    link: RayLink | ZmqLink | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkerLinks:
    """The router's links. `choice` auto takes ZeroMQ where it can be opened and Ray elsewhere."""

    def __init__(self, choice: LinkChoice) -> None:
        self._choice = choice
        self._keys = KeyPair.generate()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._entries: dict[str, _Entry] = {}
        self._injector = injector_from()

    async def link_to(self, worker_id: str, actor: Any) -> Link:
        """Return the link to a worker, opening it unless it is open. `actor` is its Ray handle.

        Raises LinkClosedError when the worker is gone, ConfigurationError when only ZeroMQ is allowed and it cannot
        be reached that way.
        """
        self._forget_lost(except_for=worker_id)
        entry = self._entries.setdefault(worker_id, _Entry())
        # Workers register again and again, also while an earlier registration waits.
        async with entry.opening:
            if isinstance(entry.link, ZmqLink):
                await self._reconnected(entry)
            if entry.link is None:
                entry.link = await self._open(worker_id, actor)
            if self._entries.get(worker_id) is not entry:
                _close(entry)
                raise LinkClosedError("the worker went out of service meanwhile")
            return entry.link if self._injector is None else FaultyLink(entry.link, self._injector)

    def kind_of(self, worker_id: str) -> LinkKind | None:
        """Return what carries the worker's messages, None if it has no link."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.link is None:
            return None
        return "zmq" if isinstance(entry.link, ZmqLink) else "ray"

    def close(self, worker_id: str) -> None:
        """Close the link to a worker that is out of service."""
        entry = self._entries.pop(worker_id, None)
        if entry is not None:
            _close(entry)

    def close_all(self) -> None:
        """Close every link."""
        for worker_id in list(self._entries):
            self.close(worker_id)
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _open(self, worker_id: str, actor: Any) -> RayLink | ZmqLink:
        if self._choice == "ray":
            return RayLink(actor)
        try:
            return await self._open_zmq(actor)
        except LinkError as error:
            if self._choice == "zmq":
                raise ConfigurationError(f"router.link zmq: {worker_id} cannot be reached: {error}") from error
            logger.warning("%s is reached over Ray, which is slower; ZeroMQ failed: %s", worker_id, error)
            return RayLink(actor)
        except RayActorError as error:
            raise LinkClosedError("the worker's process is gone") from error

    async def _open_zmq(self, actor: Any) -> ZmqLink:
        """Exchange keys through Ray and connect. Raises LinkError saying what failed, RayActorError."""
        deadline_s = asyncio.get_running_loop().time() + OPEN_TIMEOUT_S
        try:
            address = await asyncio.wait_for(actor.open_link.remote(self._keys.public), OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise LinkError(f"the worker did not open a port within {OPEN_TIMEOUT_S:g} s") from error
        except RayTaskError as error:
            raise LinkError(f"the worker cannot open a port: {error.cause!r}") from error
        if self._context is None:
            self._context = zmq.Context()
        link = ZmqLink(self._context, self._keys, address)
        try:
            await link.opened(deadline_s - asyncio.get_running_loop().time())
        except BaseException:
            link.close()
            raise
        return link

    async def _reconnected(self, entry: _Entry) -> None:
        """Wait for the entry's link if it is out of reach, and give it up if it stays so."""
        assert isinstance(entry.link, ZmqLink)
        try:
            await entry.link.opened(RECONNECT_TIMEOUT_S)
        except LinkClosedError:
            entry.link.close()
            entry.link = None

    def _forget_lost(self, except_for: str) -> None:
        """Close links to workers that went without a word: sockets would look for them for ever."""
        for worker_id, entry in list(self._entries.items()):
            lost = isinstance(entry.link, ZmqLink) and entry.link.lost_for_s() > FORGET_AFTER_S
            if lost and worker_id != except_for:
                self.close(worker_id)


def _close(entry: _Entry) -> None:
    if isinstance(entry.link, ZmqLink):
        entry.link.close()
