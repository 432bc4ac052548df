"""Real workers that take the time of an emulated device: the answers are real, only their time is made up."""

import time
from collections.abc import Iterable
from dataclasses import replace

from workers.answering import Target
from workers.drafters.base import Drafter, DrafterLimits
from workers.emulated.timing import DrafterTiming, EmulatedDevice, EmulatedUsage, TargetTiming
from workers.messages import (
    DraftAheadRequest,
    DraftAheadResponse,
    ProposeRequest,
    ProposeResponse,
    VerifyRequest,
    VerifyResponse,
    WorkerStats,
)


class EmulatedTarget:
    """A target whose steps end when the emulated device's would; `compute_ms` is that time."""

    def __init__(self, inner: Target, timing: TargetTiming) -> None:
        self._inner = inner
        self._timing = timing
        self._device = EmulatedDevice()

    @property
    def usage(self) -> EmulatedUsage:
        """What the device has done."""
        return self._device.usage

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        """See `Target.verify`."""
        began_s = time.perf_counter()
        response = self._inner.verify(request)
        took_ms = self._device.finish(began_s, self._timing.verify_ms(response), response.read_tokens)
        return replace(response, compute_ms=took_ms)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Target.release`; takes no emulated time."""
        self._inner.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """See `Target.stats`."""
        return self._inner.stats()


class EmulatedDrafter:
    """A drafter whose steps end when the emulated device's would; `compute_ms` is that time."""

    def __init__(self, inner: Drafter, timing: DrafterTiming) -> None:
        self._inner = inner
        self._timing = timing
        self._device = EmulatedDevice()
        self._ahead = EmulatedDevice()

    @property
    def usage(self) -> EmulatedUsage:
        """What proposals took; tokens are drafts."""
        return self._device.usage

    @property
    def ahead_usage(self) -> EmulatedUsage:
        """What drafting ahead took; tokens are drafts, those of all branches."""
        return self._ahead.usage

    @property
    def limits(self) -> DrafterLimits:
        """See `Drafter.limits`."""
        return self._inner.limits

    def propose(self, request: ProposeRequest) -> ProposeResponse:
        """See `Drafter.propose`."""
        began_s = time.perf_counter()
        response = self._inner.propose(request)
        drafts = sum(len(answer.proposal) for answer in response.items)
        took_ms = self._device.finish(began_s, self._timing.propose_ms(request, response), drafts)
        return replace(response, compute_ms=took_ms)

    def draft_ahead(self, request: DraftAheadRequest) -> DraftAheadResponse:
        """See `Drafter.draft_ahead`."""
        began_s = time.perf_counter()
        response = self._inner.draft_ahead(request)
        drafts = sum(len(branch.proposal) for answer in response.items for branch in answer.branches)
        took_ms = self._ahead.finish(began_s, self._timing.draft_ahead_ms(request, response), drafts)
        return replace(response, compute_ms=took_ms)

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Drafter.release`; takes no emulated time."""
        self._inner.release(sequence_ids)

    def stats(self) -> WorkerStats:
        """See `Drafter.stats`."""
        return self._inner.stats()


def stretched_target(target: Target, timing: TargetTiming | None) -> Target:
    """Return `target`, with the time of an emulated device if there is one."""
    return target if timing is None else EmulatedTarget(target, timing)


def stretched_drafter(drafter: Drafter, timing: DrafterTiming | None) -> Drafter:
    """Return `drafter`, with the time of an emulated device if there is one."""
    return drafter if timing is None else EmulatedDrafter(drafter, timing)
