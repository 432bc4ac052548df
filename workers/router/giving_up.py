"""Which sequences go to no other target after theirs has failed, and what their clients are told."""

from collections.abc import Mapping

from workers.messages import GenerationFailed
from workers.router.lane import Lane
from workers.router.running import RunningSequence
from workers.router.suspicion import BarrenTargets


class GivingUp:
    """Looks at sequences whose target has failed. `lanes` are those of the targets in service."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes
        self._barren = BarrenTargets()

    def target_failed(self, lane: Lane) -> None:
        """Note that the lane's target, which is in service no more, has failed over what it was doing."""
        lane.target.under_way.blame()
        self._barren.failed(lane.target.under_way.outlived)

    def reason(self, running: RunningSequence) -> GenerationFailed | None:
        """Say why the sequence is given up; None if it goes on elsewhere."""
        suspicion = running.sequence.target.suspicion
        if running.is_check:
            return GenerationFailed(503, "service_unavailable", "its target failed")
        if suspicion.is_isolated and self._barren.are_to_blame and not self._any_works():
            return GenerationFailed(503, "service_unavailable", "one target after the other failed at its first step")
        if suspicion.is_proven:
            reason = f"{suspicion.strikes} targets in a row failed over the request, the last one while it ran alone"
            return GenerationFailed(500, "poison_request", reason)
        return None

    def _any_works(self) -> bool:
        return any(lane.target.under_way.outlived for lane in self._lanes.values())
