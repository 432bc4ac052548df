"""The router's state as metrics: what was recorded, and what stands in its status."""

from collections import Counter
from dataclasses import asdict

from workers.messages import MetricSeries, MetricsSnapshot, RouterStatus, WorkerReport, WorkerRole, WorkerStats
from workers.metrics.store import MetricStore


class SnapshotTaker:
    """Joins the store with what a status says.

    A worker that does not answer in time is taken to be as it was when it last did.
    """

    def __init__(self, store: MetricStore) -> None:
        self._store = store
        self._last_stats: dict[str, WorkerStats] = {}

    def take(self, status: RouterStatus) -> MetricsSnapshot:
        """Return all metrics as of `status`, which was asked for with the workers' stats."""
        reports = [self._with_stats(report) for report in status.workers]
        self._last_stats = {report.registration.worker_id: stats for report, stats in reports if stats is not None}
        series = [*self._store.series(), *_of_router(status), *_of_drafters(status)]
        for report, stats in reports:
            series += _of_worker(report, stats)
        # What the status counts stands in the store, too, as declared and never added to.
        return MetricsSnapshot(tuple({(each.metric, each.labels): each for each in series}.values()))

    def _with_stats(self, report: WorkerReport) -> tuple[WorkerReport, WorkerStats | None]:
        return report, report.stats or self._last_stats.get(report.registration.worker_id)


def _of_router(status: RouterStatus) -> list[MetricSeries]:
    registered = Counter(report.registration.role for report in status.workers)
    checks = [MetricSeries(f"online_check_{name}", (), count) for name, count in asdict(status.online_check).items()]
    return [
        MetricSeries("num_requests_running", (), status.running),
        MetricSeries("num_requests_waiting", (), status.waiting),
        MetricSeries("num_preemptions", (), status.totals.preemptions),
        MetricSeries("late_drafts", (), status.totals.late_drafts),
        *(MetricSeries("workers", (role.value,), registered[role]) for role in WorkerRole),
        *checks,
    ]


def _of_drafters(status: RouterStatus) -> list[MetricSeries]:
    benched = {report.worker_id for report in status.drafters if report.benched}
    return [
        MetricSeries("drafter_benched", (entry.name, entry.worker_id), float(entry.worker_id in benched))
        for entry in (report.registration for report in status.workers)
        if entry.role is WorkerRole.DRAFT
    ]


def _of_worker(report: WorkerReport, stats: WorkerStats | None) -> list[MetricSeries]:
    entry = report.registration
    if stats is None:
        return []
    values = {
        "kv_blocks_used": stats.total_blocks - stats.free_blocks,
        "kv_blocks_total": stats.total_blocks,
        "kv_blocks_cached": stats.cached_blocks,
        "worker_sequences": stats.sequences,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
    }
    labels = (entry.role.value, entry.name, entry.worker_id)
    return [MetricSeries(metric, labels, value) for metric, value in values.items()]
