"""Sets up the OpenTelemetry SDK in a process, by configuration and the OTEL_* variables. The only module that does."""

import atexit
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_SDK_DISABLED,
    OTEL_SERVICE_NAME,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from workers.errors import ConfigurationError
from workers.telemetry.config import ExporterName, TelemetryConfig
from workers.telemetry.tracing import NO_TRACING, Tracing

logger = logging.getLogger(__name__)
OTEL_TRACES_EXPORTER = "OTEL_TRACES_EXPORTER"
SERVE_EXPORTER_VARIABLE = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"
FLUSH_TIMEOUT_S = 2.0
LINE_EVERY_S = 60.0
# Workers are ended without notice: what they have not exported by then is lost.
EXPORT_DELAY_MS = 500
QUEUED_SPANS = 16_384
_SDK_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")


def set_up_tracing(
    config: TelemetryConfig, role: str, instance: str | None = None, environment: Mapping[str, str] = os.environ
) -> Tracing:
    """Return how this process traces. ConfigurationError if a variable has an impossible value.

    `role` (ingress, router, draft, target) becomes part of the service's name, `instance` its id. Where Ray Serve's own
    tracing has set a provider, its spans and ours go the same way; in an actor of which Serve knows nothing, its
    exporter is used if no other one is asked for.
    """
    if config.enabled is False or environment.get(OTEL_SDK_DISABLED, "").strip().lower() == "true":
        return NO_TRACING
    serves = trace.get_tracer_provider()
    if isinstance(serves, TracerProvider):
        return _tracing(serves, config)
    processors = _processors(config, role, environment)
    if not processors:
        return NO_TRACING
    sampler = None if config.sample_ratio is None else ParentBasedTraceIdRatio(config.sample_ratio)
    provider = TracerProvider(sampler, _resource(config, role, instance, environment), shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    tracing = _tracing(provider, config)
    atexit.register(tracing.flush)
    return tracing


def exporter_name(config: TelemetryConfig, environment: Mapping[str, str]) -> ExporterName | None:
    """Return which exporter is asked for, by configuration or else by OTEL_* variables; None if none is.

    ConfigurationError, with the variable's name, for a value that is not known here.
    """
    if config.exporter is not None:
        return config.exporter
    named = environment.get(OTEL_TRACES_EXPORTER, "").strip()
    endpoints = (config.endpoint, environment.get(OTEL_EXPORTER_OTLP_ENDPOINT))
    asked = config.enabled or any((*endpoints, environment.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)))
    if named == "none" or (not named and not asked):
        return None
    if named == "console":
        return "console"
    if named not in ("", "otlp"):
        raise ConfigurationError(f"{OTEL_TRACES_EXPORTER}: must be otlp, console or none, not {named!r}")
    variable = OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
    if not environment.get(variable):
        variable = OTEL_EXPORTER_OTLP_PROTOCOL
    protocol = environment.get(variable) or "grpc"
    protocols: dict[str, ExporterName] = {"grpc": "otlp-grpc", "http/protobuf": "otlp-http"}
    if protocol not in protocols:
        raise ConfigurationError(f"{variable}: must be grpc or http/protobuf, not {protocol!r}")
    return protocols[protocol]


def span_processors(config: TelemetryConfig, role: str, environment: Mapping[str, str]) -> list[SpanProcessor]:
    """Return what exports spans: a queue and a thread that empties it, or nothing if no exporter is asked for."""
    name = exporter_name(config, environment)
    if name is None:
        return []
    exporter = QuietExporter(_exporter(name, config, role))
    delay_ms = None if environment.get(OTEL_BSP_SCHEDULE_DELAY) else EXPORT_DELAY_MS
    queued = None if environment.get(OTEL_BSP_MAX_QUEUE_SIZE) else QUEUED_SPANS
    return [BatchSpanProcessor(exporter, queued, delay_ms)]


def serve_span_processors() -> list[SpanProcessor]:
    """For RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH: export Serve's spans as the OTEL_* variables say."""
    return span_processors(TelemetryConfig(enabled=True), "serve", os.environ)


class QuietExporter(SpanExporter):
    """Exports with `exporter`. When spans are lost it says so in one line a minute, whatever the SDK would say."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._next_line_s = 0.0
        self._lost = 0
        for name in _SDK_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter.export`."""
        reason = "the exporter says no more"
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            result, reason = SpanExportResult.FAILURE, repr(error)
        if result is not SpanExportResult.SUCCESS:
            self._note_loss(len(spans), reason)
        return result

    def shutdown(self) -> None:
        """See `SpanExporter.shutdown`."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanExporter.force_flush`."""
        return self._exporter.force_flush(timeout_millis)

    def _note_loss(self, spans: int, reason: str) -> None:
        self._lost += spans
        if time.monotonic() < self._next_line_s:
            return
        self._next_line_s = time.monotonic() + LINE_EVERY_S
        name = type(self._exporter).__name__
        logger.warning("%s cannot export: %d spans are lost so far (%s)", name, self._lost, reason)


def _tracing(provider: TracerProvider, config: TelemetryConfig) -> Tracing:
    def flush() -> None:
        # A thread, because the SDK heeds no time-out of its own here; it dies with the process.
        thread = threading.Thread(target=provider.force_flush, daemon=True)
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)

    return Tracing(provider.get_tracer("leadout"), config.max_spans, flush)


def _processors(config: TelemetryConfig, role: str, environment: Mapping[str, str]) -> list[SpanProcessor]:
    serves = environment.get(SERVE_EXPORTER_VARIABLE)
    if not serves or exporter_name(config, environment) is not None:
        return span_processors(config, role, environment)
    try:
        module, _, attribute = serves.replace(":", ".").rpartition(".")
        return list(getattr(importlib.import_module(module), attribute)())
    except Exception as error:
        logger.warning("%s=%s cannot be used in the process of a worker: %r", SERVE_EXPORTER_VARIABLE, serves, error)
        return []


def _resource(config: TelemetryConfig, role: str, instance: str | None, environment: Mapping[str, str]) -> Resource:
    base = config.service_name or environment.get(OTEL_SERVICE_NAME) or "leadout"
    return Resource.create(
        {
            "service.name": f"{base}-{role}",
            "service.namespace": base,
            "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
            "process.pid": os.getpid(),
            "leadout.role": role,
        }
    )


def _exporter(name: ExporterName, config: TelemetryConfig, role: str) -> SpanExporter:
    options: dict[str, Any] = {} if config.endpoint is None else {"endpoint": config.endpoint}
    # Imported here: each brings libraries of its own.
    match name:
        case "otlp-grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(**options)
        case "otlp-http":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            if config.endpoint is not None and urlsplit(config.endpoint).path in ("", "/"):
                options["endpoint"] = config.endpoint.rstrip("/") + "/v1/traces"
            return HttpExporter(**options)
        case "console":
            return ConsoleSpanExporter(formatter=_json_line)
        case "file":
            folder = Path(config.directory or ".")
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / f"{role}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
            return ConsoleSpanExporter(out=file, formatter=_json_line)


def _json_line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"
