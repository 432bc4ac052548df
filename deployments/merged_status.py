"""What several routers tell, as if there were one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from workers.messages import (
    ROUTER_LABEL,
    MetricsSnapshot,
    OnlineCheckTotals,
    RoundTotals,
    RouterReport,
    RouterStatus,
)

Totals = TypeVar("Totals", RoundTotals, OnlineCheckTotals)


def merged_status(names: Sequence[str], answers: Mapping[str, RouterStatus]) -> RouterStatus:
    """Return the status of all routers called `names`, of which those of `answers`, at least one, have answered.

    Sums are those of the routers that did. Each worker has one router, so it is listed once. A single router that
    drains speaks for the service, as all are told to together.
    """
    known = [answers[name] for name in names if name in answers]
    return RouterStatus(
        running=sum(status.running for status in known),
        waiting=sum(status.waiting for status in known),
        workers=tuple(
            replace(worker, router=name) for name in names if name in answers for worker in answers[name].workers
        ),
        totals=_sum(RoundTotals, (status.totals for status in known)),
        online_check=_sum(OnlineCheckTotals, (status.online_check for status in known)),
        drafters=tuple(drafter for status in known for drafter in status.drafters),
        loading=all(status.loading for status in known),
        draining=any(status.draining for status in known),
        routers=tuple(_report(name, answers.get(name)) for name in names),
    )


def merged_metrics(answers: Mapping[str, MetricsSnapshot]) -> MetricsSnapshot:
    """Return all series of all routers, each with its router's name as a label."""
    labelled = [snapshot.labelled(ROUTER_LABEL, name) for name, snapshot in answers.items()]
    return MetricsSnapshot(tuple(series for each in labelled for series in each.series), (ROUTER_LABEL,))


def _report(name: str, status: RouterStatus | None) -> RouterReport:
    if status is None:
        return RouterReport(name, answers=False)
    return RouterReport(name, True, status.running, status.waiting, status.totals)


def _sum(kind: type[Totals], all_totals: Iterable[Totals]) -> Totals:
    known = list(all_totals)
    return kind(**{field.name: sum(getattr(totals, field.name) for totals in known) for field in fields(kind)})
