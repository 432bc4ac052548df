"""A registered worker as the router sees it: its link, its KV ledger, its steps, and releases sent together."""

import asyncio
import logging
from typing import TYPE_CHECKING

from workers.errors import DeadlineExceededError, LinkError
from workers.messages import ReleaseRequest, StatsRequest, WorkerRegistration, WorkerReport, WorkerStats
from workers.router.detached import detached_task
from workers.router.ledger import BlockLedger
from workers.router.suspicion import StepsUnderWay

if TYPE_CHECKING:
    from workers.links import Link

logger = logging.getLogger(__name__)
CONTROL_DEADLINE_S = 10.0
RELEASE_TRIES = 5
RELEASE_AGAIN_S = 1.0


class Peer:
    """One worker. Messages on its link are answered in order, so a release never overtakes a step."""

    def __init__(self, registration: WorkerRegistration, link: "Link") -> None:
        self.registration = registration
        self.link = link
        self.ledger = BlockLedger(registration.total_blocks, registration.block_tokens)
        self.under_way = StepsUnderWay()
        self._to_release: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self.registration.worker_id

    def release(self, sequence_id: int) -> None:
        """Free the sequence's KV: all releases of one turn of the event loop travel as one message."""
        self.ledger.release(sequence_id)
        if not self._to_release:
            task = detached_task(self._send_releases())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._to_release.add(sequence_id)

    async def releases_sent(self) -> None:
        """Wait until all releases are on their way: a step sent before them could need the blocks they free."""
        while self._to_release:
            await asyncio.sleep(0)

    async def report(self, deadline_s: float) -> WorkerReport:
        """Ask the worker for its KV accounting; no stats if it does not answer in time."""
        try:
            stats = await self.link.call(StatsRequest(), deadline_s)
        except LinkError:
            stats = None
        return WorkerReport(self.registration, stats if isinstance(stats, WorkerStats) else None)

    async def _send_releases(self) -> None:
        await asyncio.sleep(0)
        released, self._to_release = self._to_release, set()
        for _ in range(RELEASE_TRIES):
            if not released:
                return
            try:
                await self.link.call(ReleaseRequest(tuple(released)), CONTROL_DEADLINE_S)
                return
            except DeadlineExceededError as error:
                logger.debug("release at %s is sent again: %s", self.worker_id, error)
            except LinkError as error:
                # A worker that is gone has nothing left to free; one that drops out is reset when it registers again.
                # But where only this message was lost, nothing else would ever free these blocks.
                logger.debug("release at %s failed: %s", self.worker_id, error)
                await asyncio.sleep(RELEASE_AGAIN_S)
            released -= self.ledger.reserved.keys()
