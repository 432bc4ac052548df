"""Spans kept in memory, and what any tree of them must be like."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from tests.fakes.workers import ScriptedWorker
from workers.messages import WorkerRequest, WorkerResponse
from workers.telemetry.steps import StepSpans
from workers.telemetry.tracing import Tracing

ROUND = ("draft", "verify", "commit")


@dataclass(frozen=True)
class Shown:
    """A span as tests look at it; times in nanoseconds, ids in hexadecimal digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: int
    end: int
    attributes: dict[str, object]
    events: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    failed: bool = False

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass
class Traced:
    """Traces into memory. `ratio` is the share of traces that are begun here."""

    ratio: float = 1.0
    max_spans: int = 2000
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.provider = TracerProvider(sampler=ParentBasedTraceIdRatio(self.ratio))
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider.get_tracer("test"), self.max_spans)

    @property
    def spans(self) -> list[Shown]:
        """The spans that have ended, by the time they began."""
        return sorted(map(_shown, self.exporter.get_finished_spans()), key=lambda span: span.start)


OF_SERVE = InMemorySpanExporter()


def serve_processors() -> list[SpanProcessor]:
    """What the exporter that Ray Serve is told of returns."""
    return [SimpleSpanProcessor(OF_SERVE)]


class SpanLink:
    """A link to a scripted worker that makes spans of its steps, as real workers do."""

    def __init__(self, worker: ScriptedWorker, tracing: Tracing) -> None:
        self._worker = worker
        self._spans = StepSpans(tracing, worker.worker_id)

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        answer = await self._worker.call(message, deadline_s)
        return self._spans.around(message, lambda: answer)


def named(spans: Iterable[Shown], *names: str) -> list[Shown]:
    """The spans of these names."""
    return [span for span in spans if span.name in names]


def in_trace(spans: Iterable[Shown], trace_id: str) -> list[Shown]:
    """The spans of a trace."""
    return [span for span in spans if span.trace_id == trace_id]


def assert_complete(spans: list[Shown], trace_id: str, root_parent: str | None) -> None:
    """One root below `root_parent`; every other span below another one, within its time; rounds are siblings."""
    mine = in_trace(spans, trace_id)
    by_id = {span.span_id: span for span in mine}
    roots = [span for span in mine if span.parent_id not in by_id]
    assert [root.parent_id for root in roots] == [root_parent]
    for span in mine:
        assert span.duration >= 0
        if span.parent_id in by_id:
            parent = by_id[span.parent_id]
            assert parent.start <= span.start
            # A round does not wait for a drafter that is late, and a sequence may end while one drafts ahead.
            assert span.end <= parent.end or span.name in ("draft.step", "draft_ahead.step")
    (sequence,) = named(mine, "sequence")
    prefills = {span.span_id for span in named(mine, "prefill")}
    assert {span.parent_id for span in named(mine, *ROUND)} <= prefills | {sequence.span_id}
    steps = {"draft.step": "draft", "verify.step": "verify", "draft_ahead.step": "sequence"}
    assert all(by_id[step.parent_id or ""].name == steps[step.name] for step in named(mine, *steps))


def assert_tiled(spans: list[Shown], trace_id: str, least_share: float) -> None:
    """Queue, prefill and the rounds behind it follow each other and make up `least_share` of the sequence's time.

    In real time the share is 0: whoever shares the machine may take any time between two of them.
    """
    mine = in_trace(spans, trace_id)
    (sequence,) = named(mine, "sequence")
    below = [span for span in mine if span.parent_id == sequence.span_id and span.name != "draft_ahead.step"]
    parts = sorted(below, key=lambda span: (span.start, span.end))
    assert all(one.end <= other.start for one, other in itertools.pairwise(parts))
    assert least_share * sequence.duration <= sum(span.duration for span in parts) <= sequence.duration


def _shown(span: ReadableSpan) -> Shown:
    assert span.context is not None and span.start_time is not None and span.end_time is not None
    return Shown(
        span.name,
        f"{span.context.trace_id:032x}",
        f"{span.context.span_id:016x}",
        None if span.parent is None else f"{span.parent.span_id:016x}",
        span.start_time,
        span.end_time,
        dict(span.attributes or {}),
        tuple(event.name for event in span.events),
        tuple((f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links),
        not span.status.is_ok,
    )
