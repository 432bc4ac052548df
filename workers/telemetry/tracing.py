"""A process's way to make spans, or the lack of one, and trace contexts as text (W3C Trace Context)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from workers.telemetry.config import DEFAULT_MAX_SPANS

_PROPAGATOR = TraceContextTextMapPropagator()


def _nothing_to_flush() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Tracing:
    """`tracer` is None where nothing is traced. `flush` exports what has ended, in bounded time, and never raises."""

    tracer: Tracer | None = None
    max_spans: int = DEFAULT_MAX_SPANS
    flush: Callable[[], None] = _nothing_to_flush


NO_TRACING = Tracing()


def context_from(carrier: Mapping[str, str]) -> Context:
    """Return the context of a `traceparent` (and `tracestate`); an empty one if there is none or it makes no sense."""
    return _PROPAGATOR.extract(carrier, context=Context())


def carrier_of(span: Span) -> dict[str, str]:
    """Return what a child of `span` in another process needs: `traceparent` and, if there is one, `tracestate`."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=set_span_in_context(span, Context()))
    return carrier


def traceparent_of(span: Span) -> str:
    """Return the `traceparent` alone, which is all that a worker's step needs."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id_of(carrier: Mapping[str, str]) -> str | None:
    """Return the 32 hexadecimal digits of the trace that a `traceparent` belongs to."""
    parts = carrier.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 else None
