"""A snapshot as gauges of a monitoring client that has no better way to say what a counter stands at.

Ray's own counters begin with their first increment, so that a query sees no increase from 0, and its histograms only
approximate their sums. A gauge for each sample says exactly what the router has counted.
"""

from collections.abc import Callable
from typing import Protocol

from workers.messages import MetricsSnapshot
from workers.metrics.samples import samples


class Gauge(Protocol):
    """What `ray.util.metrics.Gauge` offers."""

    def set(self, value: float, tags: dict[str, str]) -> None:
        """Set the value of the series with these labels."""
        ...


class GaugeExport:
    """Sets gauges, which `make_gauge` makes of a name, a help text and label names when they are first needed."""

    def __init__(self, make_gauge: Callable[[str, str, tuple[str, ...]], Gauge]) -> None:
        self._make_gauge = make_gauge
        self._gauges: dict[str, Gauge] = {}

    def publish(self, snapshot: MetricsSnapshot) -> None:
        """Set every sample of the snapshot."""
        for sample in samples(snapshot):
            gauge = self._gauges.get(sample.name)
            if gauge is None:
                gauge = self._make_gauge(sample.name, sample.help, sample.label_names)
                self._gauges[sample.name] = gauge
            gauge.set(sample.value, dict(zip(sample.label_names, sample.labels, strict=True)))
