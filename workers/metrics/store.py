"""Counts and observations as plain numbers: what a round adds costs a few dictionary look-ups."""

from bisect import bisect_left
from dataclasses import dataclass

from workers.messages import MetricSeries
from workers.metrics.catalogue import BY_NAME, MetricType


@dataclass(slots=True)
class _Histogram:
    """Observations per bucket, with one more for those above every bound, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0


class MetricStore:
    """Counters and histograms of the catalogue, by metric and label values.

    Every method raises KeyError for a metric that is not in the catalogue, and ValueError where the labels are not as
    many as the metric has.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], _Histogram] = {}

    def declare(self, metric: str, labels: tuple[str, ...] = ()) -> None:
        """Let the series exist, with nothing counted yet; one that exists stays as it is."""
        known, key = BY_NAME[metric], (metric, labels)
        if len(labels) != len(known.labels):
            raise ValueError(f"{metric} has the labels {known.labels}, not {len(labels)} of them")
        if known.type is MetricType.HISTOGRAM and key not in self._histograms:
            self._histograms[key] = _Histogram(known.buckets, [0] * (len(known.buckets) + 1))
        elif known.type is MetricType.COUNTER:
            self._counters.setdefault(key, 0)

    def add(self, metric: str, labels: tuple[str, ...] = (), amount: float = 1) -> None:
        """Add to a counter."""
        key = (metric, labels)
        try:
            self._counters[key] += amount
        except KeyError:
            self.declare(metric, labels)
            self._counters[key] += amount

    def observe(self, metric: str, value: float, labels: tuple[str, ...] = ()) -> None:
        """Count one observation in its bucket, whose upper bound belongs to it."""
        histogram = self._histograms.get((metric, labels))
        if histogram is None:
            self.declare(metric, labels)
            histogram = self._histograms[(metric, labels)]
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.sum += value

    def series(self) -> list[MetricSeries]:
        """Return all series as they are now."""
        counters = [MetricSeries(metric, labels, value) for (metric, labels), value in self._counters.items()]
        histograms = [
            MetricSeries(metric, labels, histogram.sum, tuple(histogram.counts))
            for (metric, labels), histogram in self._histograms.items()
        ]
        return counters + histograms
