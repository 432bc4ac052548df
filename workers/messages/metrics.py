"""What the router has counted and measured, as it is exported: each metric of `workers.metrics.catalogue`."""

from dataclasses import dataclass, replace

ROUTER_LABEL = "router"
"""Where there are several routers, each series has this label, too: counters of one may start anew beside others'."""


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One metric with one set of label values, in the order of the metric's labels.

    `value` is that of a counter or gauge, and the sum of what a histogram has observed. A histogram's `buckets` count
    the observations in each of its buckets, not cumulated; the last one is of those above every bound.
    """

    metric: str
    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All series at one moment. Counters and histograms are sums since the router started, times are in seconds.

    Every series has values of `common_labels`, too, behind those of its metric's own labels.
    """

    series: tuple[MetricSeries, ...]
    common_labels: tuple[str, ...] = ()

    def labelled(self, label: str, value: str) -> "MetricsSnapshot":
        """Return the same with one label more on every series."""
        series = tuple(replace(each, labels=(*each.labels, value)) for each in self.series)
        return MetricsSnapshot(series, (*self.common_labels, label))

    def total(self, metric: str, *labels: str) -> float:
        """Return the sum of the metric's values over the series whose first labels are `labels`; 0 if there is none."""
        return sum(each.value for each in self.of(metric) if each.labels[: len(labels)] == labels)

    def of(self, metric: str) -> tuple[MetricSeries, ...]:
        """Return the series of one metric."""
        return tuple(each for each in self.series if each.metric == metric)
