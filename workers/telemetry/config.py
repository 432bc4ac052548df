"""How a process exports what it traces."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ExporterName: TypeAlias = Literal["otlp-grpc", "otlp-http", "console", "file"]
DEFAULT_MAX_SPANS = 2000


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What the deployment says; None leaves it to the standard OTEL_* variables of each process.

    `endpoint` is a URL and `directory` the folder of the exporter "file". `sample_ratio` (0 to 1) is the share of
    traces that are begun here; where a client began one, its decision holds. `max_spans` bounds what one sequence adds
    to a trace: rounds beyond it get no spans. `service_name` is the common part of the processes' names.
    """

    enabled: bool | None = None
    exporter: ExporterName | None = None
    endpoint: str | None = None
    directory: str | None = None
    sample_ratio: float | None = None
    max_spans: int = DEFAULT_MAX_SPANS
    service_name: str | None = None


BY_ENVIRONMENT = TelemetryConfig()
