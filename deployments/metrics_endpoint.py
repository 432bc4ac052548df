"""GET /metrics: everything that router and workers count and measure, in the text that Prometheus reads."""

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from deployments.asking_router import ask_router
from deployments.generation import GenerationService
from workers.messages import MetricSeries, MetricsSnapshot
from workers.metrics.catalogue import CATALOGUE, Metric, MetricType
from workers.metrics.samples import bucket_counts

TIMEOUT_S = 6.0


class MetricsEndpoint:
    """The handler. The metrics are the routers' own, so every ingress process answers alike."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: in OpenMetrics where the request's accept header prefers it."""
        snapshot = await ask_router(self._service.metrics(), TIMEOUT_S)
        text, content_type = exposition(snapshot, request.headers.get("accept", ""))
        return Response(text, media_type=content_type)


def exposition(snapshot: MetricsSnapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the snapshot in the format that `accept` asks for, and its content type."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class SnapshotCollector(Collector):
    """A snapshot as families of `prometheus_client`: all metrics of the catalogue, also those without a series."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._common_labels = snapshot.common_labels
        self._series: dict[str, list[MetricSeries]] = defaultdict(list)
        for series in snapshot.series:
            self._series[series.metric].append(series)

    def collect(self) -> Iterator[Family]:
        """Yield a family for each metric of the catalogue."""
        for metric in CATALOGUE:
            labels = (*metric.labels, *self._common_labels)
            yield _family(metric, labels, self._series.get(metric.name, []))


def _family(metric: Metric, labels: tuple[str, ...], all_series: list[MetricSeries]) -> Family:
    if metric.type is MetricType.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.family, metric.help, labels=labels)
        for series in all_series:
            histogram.add_metric(series.labels, bucket_counts(metric, series), series.value)
        return histogram
    kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    family = kind(metric.family, metric.help, labels=labels)
    for series in all_series:
        family.add_metric(series.labels, series.value)
    return family
