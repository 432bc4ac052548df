"""The spans of a real service as a real OTLP collector gets them."""

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.collector import running_collector
from tests.fakes.tracing import Shown

STATUS_ERROR = 2


class Collector:
    """`spans` are those that have arrived, each with its process's `service.name` among its attributes."""

    def __init__(self) -> None:
        self._spans: list[Shown] = []
        self.endpoint = ""

    @property
    def spans(self) -> list[Shown]:
        return sorted(self._spans, key=lambda span: span.start)

    def take(self, request: Any) -> None:
        """Keep the spans of a message."""
        self._spans += [
            _shown(span, {attribute.key: _value(attribute.value) for attribute in resource.resource.attributes})
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at a free port of 127.0.0.1."""
    collector = Collector()
    with running_collector(collector.take) as collector.endpoint:
        yield collector


def _shown(span: Any, resource: dict[str, object]) -> Shown:
    attributes = {attribute.key: _value(attribute.value) for attribute in span.attributes}
    return Shown(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex() or None,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes | {"service.name": resource["service.name"]},
        tuple(event.name for event in span.events),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        span.status.code == STATUS_ERROR,
    )


def _value(value: Any) -> object:
    return getattr(value, value.WhichOneof("value"))
