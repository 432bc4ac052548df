"""The configuration of traces and request logs."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers.telemetry.config import DEFAULT_MAX_SPANS, ExporterName, TelemetryConfig
from workers.telemetry.request_log import RequestLogConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TelemetrySection(_Section):
    """Traces. What is not given here, the standard OTEL_* variables of each process say."""

    enabled: bool | None = Field(None, description="default: whether an exporter or endpoint is given, here or there")
    exporter: ExporterName | None = Field(None, description="otlp-grpc, otlp-http, console or file")
    endpoint: str | None = Field(None, pattern=r"^https?://[^\s/]+", description="URL of the OTLP collector")
    directory: str | None = Field(None, min_length=1, description="of the exporter file: one file per process")
    sample_ratio: float | None = Field(None, ge=0, le=1, description="of the traces that no client began")
    max_spans: int = Field(DEFAULT_MAX_SPANS, ge=16, le=1_000_000, description="that one sequence adds to a trace")
    service_name: str | None = Field(None, min_length=1, max_length=200, description="common part of service.name")

    @model_validator(mode="after")
    def _exporter_has_what_it_needs(self) -> "TelemetrySection":
        if self.endpoint is not None and self.exporter in ("console", "file"):
            raise ValueError(f"endpoint has no meaning with exporter {self.exporter}")
        if (self.directory is not None) != (self.exporter == "file"):
            raise ValueError("directory goes with exporter file, and exporter file needs a directory")
        return self

    def worker_config(self) -> TelemetryConfig:
        """Return what every process is told."""
        return TelemetryConfig(**self.model_dump())


class RequestLogSection(_Section):
    """A line for each request that has ended."""

    enabled: bool = True
    format: Literal["human", "json"] = "human"
    text: bool = Field(False, description="also log prompts and answers")
    file: str | None = Field(None, min_length=1, description="default: standard error of the router's process")

    def worker_config(self) -> RequestLogConfig:
        """Return what the router is told."""
        return RequestLogConfig(**self.model_dump())
