"""Taking workers, or the whole service, out of use without a request noticing."""

from collections.abc import Callable, Mapping

from workers.router.lane import Lane
from workers.router.placement import Placement

MAX_LEFT = 1024


class Draining:
    """What is on its way out: single workers, or the service with all of them.

    Nothing new is placed on a worker that drains. A target's sequences move to other targets as these have room, and
    resume there from their committed tokens; without another target they finish where they are. A drafter's
    sequences get another drafter at once, or none. `put_off_check` puts off the online check that runs.

    Worker ids are never used twice, so one that has drained stays out, however late a registration arrives.
    """

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        placement: Placement,
        drop_drafter: Callable[[str], None],
        put_off_check: Callable[[], bool],
    ) -> None:
        self.service = False
        self._lanes = lanes
        self._placement = placement
        self._drop_drafter = drop_drafter
        self._put_off_check = put_off_check
        self._workers: dict[str, None] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def drain(self, worker_id: str) -> int:
        """Begin to drain the worker, or go on; return how many sequences it has yet."""
        self._workers[worker_id] = None
        if len(self._workers) > MAX_LEFT:
            del self._workers[next(iter(self._workers))]
        lane = self._lanes.get(worker_id)
        if lane is None:
            self._drop_drafter(worker_id)
            return 0
        lane.draining = True
        if any(running.is_check for running in lane.running.values()):
            self._put_off_check()
        for running in sorted(lane.running.values(), key=lambda running: running.age):
            self._placement.move(running)
        if not self._placement.open_lanes():
            self._placement.start_clocks()
        return len(lane.running)
