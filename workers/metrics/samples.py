"""A snapshot as single samples, the form in which every monitoring system takes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from workers.messages import MetricSeries, MetricsSnapshot
from workers.metrics.catalogue import BY_NAME, Metric, MetricType


@dataclass(frozen=True, slots=True)
class Sample:
    """One exported number; `label_names` and `labels` belong together."""

    name: str
    help: str
    label_names: tuple[str, ...]
    labels: tuple[str, ...]
    value: float


def bucket_counts(metric: Metric, series: MetricSeries) -> list[tuple[str, int]]:
    """Return a histogram's upper bounds, `+Inf` last, each with the number of observations up to it."""
    bounds = [*map(str, metric.buckets), "+Inf"]
    return list(zip(bounds, accumulate(series.buckets), strict=True))


def samples(snapshot: MetricsSnapshot) -> Iterator[Sample]:
    """Yield the samples of all series; a histogram has one per bucket, cumulated, its sum and its count."""
    for series in snapshot.series:
        metric = BY_NAME[series.metric]
        names = (*metric.labels, *snapshot.common_labels)
        if metric.type is not MetricType.HISTOGRAM:
            yield Sample(metric.sample_names[0], metric.help, names, series.labels, series.value)
            continue
        bucket, total, count = metric.sample_names
        for bound, seen in bucket_counts(metric, series):
            yield Sample(bucket, metric.help, (*names, "le"), (*series.labels, bound), seen)
        yield Sample(total, metric.help, names, series.labels, series.value)
        yield Sample(count, metric.help, names, series.labels, sum(series.buckets))
