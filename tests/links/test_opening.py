"""Which link a worker gets, and what becomes of it: the router's side, with a worker whose Ray calls are local."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from tests.limits import HANG_S
from tests.links.helpers import serving
from workers.errors import ConfigurationError, LinkClosedError
from workers.links import opening
from workers.links.opening import WorkerLinks
from workers.links.ray_link import RayLink
from workers.links.zmq_link import ZmqLink
from workers.links.zmq_server import ZmqServer
from workers.messages import LinkAddress, StatsRequest, WorkerRequest, WorkerResponse, WorkerStats

STATS = WorkerStats(0, 7, 7)


def count(message: WorkerRequest) -> WorkerResponse | None:
    """Answer anything with the same stats."""
    return STATS


class LocalMethod:
    """A method of a Ray handle that runs here."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class LocalActor:
    """What the router calls of a worker's handle; `address` is where `open_link` sends it."""

    def __init__(self, open_link: Callable[[bytes], Awaitable[LinkAddress]]) -> None:
        self.open_link = LocalMethod(open_link)
        self.handle = LocalMethod(self._handle)

    async def _handle(self, message: WorkerRequest) -> WorkerResponse | None:
        return count(message)


class Served:
    """A worker with a server, which counts how often a link was opened."""

    def __init__(self) -> None:
        self.server = ZmqServer("127.0.0.1", count)
        self.opened = 0
        self.actor = LocalActor(self._open)

    async def _open(self, key: bytes) -> LinkAddress:
        self.opened += 1
        return self.server.admit(key)


async def unreachable(key: bytes) -> LinkAddress:
    """An address where nobody listens."""
    with serving(count) as address:
        pass
    return address


async def silent(key: bytes) -> LinkAddress:
    """A worker that never says where it listens."""
    await asyncio.Event().wait()
    raise AssertionError("never reached")


async def failing(key: bytes) -> LinkAddress:
    """A worker that cannot listen."""
    raise RayTaskError("open_link", "", OSError("no port left"))


async def is_lost(link: Any) -> None:
    """Wait until the router has seen that the connection is gone."""
    while link.lost_for_s() == 0:
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", 0.4)


@pytest.mark.parametrize("choice", ["auto", "zmq"])
def test_zeromq_is_used_where_it_can_be_and_opened_once(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", HANG_S)

    async def run() -> None:
        worker, links = Served(), WorkerLinks(choice)
        first, second = await asyncio.gather(*(links.link_to("draft-0", worker.actor) for _ in range(2)))
        assert isinstance(first, ZmqLink)
        assert first is second
        assert worker.opened == 1
        assert links.kind_of("draft-0") == "zmq"
        assert await first.call(StatsRequest(), HANG_S) == STATS
        links.close("draft-0")
        assert links.kind_of("draft-0") is None
        with pytest.raises(LinkClosedError):
            await first.call(StatsRequest(), HANG_S)
        links.close_all()
        worker.server.close()

    asyncio.run(run())


def test_ray_opens_no_port() -> None:
    async def run() -> None:
        links = WorkerLinks("ray")
        link = await links.link_to("draft-0", LocalActor(failing))
        assert isinstance(link, RayLink)
        assert await link.call(StatsRequest(), HANG_S) == STATS
        assert links.kind_of("draft-0") == "ray"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("open_link", "reason"),
    [(unreachable, "no connection"), (silent, "did not open a port"), (failing, "no port left")],
)
def test_where_zeromq_fails_auto_takes_ray_and_warns_once_by_name(
    open_link: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        links = WorkerLinks("auto")
        for _ in range(3):
            link = await links.link_to("draft-0", LocalActor(open_link))
        assert isinstance(link, RayLink)
        assert await link.call(StatsRequest(), HANG_S) == STATS
        links.close_all()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    (warning,) = [record.getMessage() for record in caplog.records if record.name == opening.__name__]
    assert "draft-0" in warning
    assert reason in warning


@pytest.mark.parametrize("open_link", [unreachable, silent, failing])
def test_where_zeromq_fails_zmq_refuses_the_worker_by_key_and_name(open_link: Any) -> None:
    async def run() -> None:
        links = WorkerLinks("zmq")
        with pytest.raises(ConfigurationError, match=r"^router\.link zmq: draft-0 cannot be reached"):
            await links.link_to("draft-0", LocalActor(open_link))
        assert links.kind_of("draft-0") is None
        links.close_all()

    asyncio.run(run())


@pytest.mark.parametrize("choice", ["auto", "zmq"])
def test_a_dead_worker_gets_no_link(choice: Any) -> None:
    async def dead(key: bytes) -> LinkAddress:
        raise RayActorError

    async def run() -> None:
        links = WorkerLinks(choice)
        with pytest.raises(LinkClosedError):
            await links.link_to("draft-0", LocalActor(dead))
        links.close_all()

    asyncio.run(run())


def test_a_worker_that_goes_while_its_link_opens_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", HANG_S)

    async def run() -> None:
        worker, links = Served(), WorkerLinks("auto")

        async def closing(key: bytes) -> LinkAddress:
            links.close("draft-0")
            return worker.server.admit(key)

        with pytest.raises(LinkClosedError, match="out of service"):
            await links.link_to("draft-0", LocalActor(closing))
        assert links.kind_of("draft-0") is None
        links.close_all()
        worker.server.close()

    asyncio.run(run())


def test_a_link_that_stays_lost_is_opened_anew_and_forgotten_when_its_worker_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        first, second, links = Served(), Served(), WorkerLinks("auto")
        lost = await links.link_to("draft-0", first.actor)
        first.server.close()
        await is_lost(lost)
        again = await links.link_to("draft-0", second.actor)
        assert again is not lost
        assert isinstance(again, ZmqLink)
        assert await again.call(StatsRequest(), HANG_S) == STATS
        second.server.close()
        await is_lost(again)
        monkeypatch.setattr(opening, "FORGET_AFTER_S", 0.0)
        monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", 0.4)
        await links.link_to("draft-1", LocalActor(unreachable))
        assert links.kind_of("draft-0") is None
        links.close_all()

    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", HANG_S)
    asyncio.run(run())
