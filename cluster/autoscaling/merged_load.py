"""The load of several routers as one, which is what the policies decide by."""

from collections.abc import Callable, Sequence
from dataclasses import fields

from workers.messages import DrafterPoolLoad, RouterLoad


def merged_load(loads: Sequence[RouterLoad]) -> RouterLoad:
    """Return the load of all routers together; each has targets and drafters of its own.

    Counts are added. Of percentiles the worst stands for all: nobody's wait may exceed it. Shares and means are those
    of the verifications that they were measured over; what is said of drafts, of the routers that have drafters, as
    the others' say nothing of them. While some have, the clients of a router that has none lack a drafter.
    """
    if len(loads) == 1:
        return loads[0]
    drafting = [load for load in loads if _has_drafters(load)]
    without = [load for load in loads if drafting and not _has_drafters(load)]
    informed = drafting or loads
    return RouterLoad(
        window_s=min((load.window_s for load in loads), default=0.0),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        undrafted=sum(load.undrafted for load in loads) + sum(load.running for load in without),
        kv_use=tuple(use for load in loads for use in load.kv_use),
        queue_wait_ms=_worst([load.queue_wait_ms for load in loads]),
        ttft_ms=_worst([load.ttft_ms for load in loads]),
        itl_ms=_worst([load.itl_ms for load in loads]),
        exposed_draft_wait=_mean(informed, lambda load: load.exposed_draft_wait) or 0.0,
        drafters_busy=sum(load.drafters_busy for load in loads),
        late_drafts=_mean(informed, lambda load: load.late_drafts) or 0.0,
        draft_tokens=_mean(informed, lambda load: load.draft_tokens) or 0.0,
        accepted_length=_mean(informed, lambda load: load.accepted_length),
        verifications=sum(load.verifications for load in informed),
        drafter_pools=_pools(loads),
    )


def _has_drafters(load: RouterLoad) -> bool:
    return any(pool.workers for pool in load.drafter_pools)


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(loads: Sequence[RouterLoad], measure: Callable[[RouterLoad], float | None]) -> float | None:
    """Return the mean over all verifications; None where there were none."""
    known = [(load.verifications, value) for load in loads if (value := measure(load)) is not None]
    total = sum(verifications for verifications, _ in known)
    return sum(verifications * value for verifications, value in known) / total if total else None


def _pools(loads: Sequence[RouterLoad]) -> tuple[DrafterPoolLoad, ...]:
    names = sorted({pool.name for load in loads for pool in load.drafter_pools})
    counts = [field.name for field in fields(DrafterPoolLoad) if field.name != "name"]
    return tuple(
        DrafterPoolLoad(name, *(sum(getattr(load.drafter_pool(name), count) for load in loads) for count in counts))
        for name in names
    )
