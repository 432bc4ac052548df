"""The spans of one sampled sequence, as the router makes them: queue, prefill, and draft, verify, commit per round."""

from collections.abc import Mapping
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from workers.telemetry.timeline import Timeline
from workers.telemetry.tracing import Tracing, context_from, traceparent_of

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

ROUND_SPANS = 6
"""The most spans that a round makes: draft, verify, commit here, and one in a worker for each step it takes part in."""


class SequenceTrace:
    """One span for the sequence, and those below it. Times are those of `time.perf_counter`.

    The spans of a round are siblings: below the `prefill` span until the first tokens are committed, below the
    sequence's own afterwards. They follow each other without gaps: `draft` ends where `verify` begins. `ahead_hit` says
    of the round under way whether drafting ahead was of use.
    """

    def __init__(self, tracer: Tracer, span: Span, timeline: Timeline, max_spans: int) -> None:
        self.ahead_hit: bool | None = None
        self._tracer = tracer
        self._span = span
        self._timeline = timeline
        self._left = max_spans - 1
        self._phase: Span | None = None
        self._draft: Span | None = None
        self._verify: Span | None = None
        self._in_detail = True
        self._rounds_without_spans = 0
        self._verified_s = 0.0

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    # --- phases and events ----------------------------------------------------------------------------------

    def enter(self, phase: str | None, at_s: float) -> None:
        """Begin the span of a phase, or none; what was open of the phase before ends."""
        self._end_round(at_s)
        if self._phase is not None:
            self._phase.end(self._timeline.epoch_ns(at_s))
        self._phase = None
        if phase is not None and self._left > 0:
            self._phase = self._child(phase, at_s, SpanKind.INTERNAL)

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """Note an event of the sequence."""
        self._span.add_event(name, attributes, self._timeline.epoch_ns(at_s))

    def end(self, at_s: float, attributes: Attributes, error: str | None) -> None:
        """End everything; `error` is the code of what the client was told if the sequence failed."""
        self.enter(None, at_s)
        if self._rounds_without_spans:
            self._span.set_attribute("leadout.rounds_without_spans", self._rounds_without_spans)
        self._span.set_attributes(attributes)
        if error is not None:
            _fail(self._span, error)
        self._span.end(self._timeline.epoch_ns(at_s))

    # --- rounds ---------------------------------------------------------------------------------------------

    def draft_begins(self, at_s: float, drafts: bool, attributes: Attributes) -> None:
        """A round begins; `drafts`: a drafter takes part in it."""
        self._end_round(at_s)
        self.ahead_hit = None
        self._in_detail = self._left >= ROUND_SPANS
        self._rounds_without_spans += not self._in_detail
        if drafts and self._in_detail:
            self._draft = self._child("draft", at_s, SpanKind.CLIENT, attributes)

    def verify_begins(self, at_s: float, drafted: int, attributes: Attributes) -> None:
        """Drafting has ended with `drafted` tokens, and the step of the target is on its way."""
        if self._draft is not None:
            self._draft.set_attribute("leadout.drafted_tokens", drafted)
            if self.ahead_hit is not None:
                self._draft.set_attribute("leadout.draft_ahead", "hit" if self.ahead_hit else "miss")
            self._draft.end(self._timeline.epoch_ns(at_s))
            self._draft = None
        if self._in_detail:
            self._verify = self._child("verify", at_s, SpanKind.CLIENT, attributes)

    def verified(self, at_s: float, attributes: Attributes) -> None:
        """The target has answered."""
        self._verified_s = at_s
        if self._verify is not None:
            self._verify.set_attributes(attributes)
            self._verify.end(self._timeline.epoch_ns(at_s))
            self._verify = None

    def committed(self, at_s: float, attributes: Attributes) -> None:
        """What was verified has become part of the sequence."""
        if self._in_detail:
            commit = self._child("commit", self._verified_s, SpanKind.INTERNAL, attributes)
            commit.end(self._timeline.epoch_ns(at_s))

    def failed(self, at_s: float, error: str) -> None:
        """The step under way was lost, and what it would have brought with it."""
        for span in (self._draft, self._verify):
            if span is not None:
                _fail(span, error)
        self._end_round(at_s)

    # --- parents of spans in the workers --------------------------------------------------------------------

    @property
    def draft_parent(self) -> str | None:
        """The `traceparent` of the drafter's step in this round; None if it is to make no span."""
        return self._parent(self._draft)

    @property
    def verify_parent(self) -> str | None:
        """The `traceparent` of the target's step in this round; None if it is to make no span."""
        return self._parent(self._verify)

    @property
    def ahead_parent(self) -> str | None:
        """The `traceparent` of drafting ahead beside this round; None if it is to make no span."""
        return self._parent(self._span if self._in_detail else None)

    def _parent(self, span: Span | None) -> str | None:
        if span is None or self._left <= 0:
            return None
        self._left -= 1
        return traceparent_of(span)

    # --- helpers --------------------------------------------------------------------------------------------

    def _child(self, name: str, at_s: float, kind: SpanKind, attributes: Attributes | None = None) -> Span:
        self._left -= 1
        # An empty context: where Serve traces, the current one has a span of another request.
        parent = set_span_in_context(self._phase or self._span, Context())
        return self._tracer.start_span(name, parent, kind, attributes, start_time=self._timeline.epoch_ns(at_s))

    def _end_round(self, at_s: float) -> None:
        """A sequence may leave a round at any time."""
        for span in (self._draft, self._verify):
            if span is not None:
                span.end(self._timeline.epoch_ns(at_s))
        self._draft = self._verify = None


def begin_trace(
    tracing: Tracing, carrier: Mapping[str, str], timeline: Timeline, attributes: Attributes
) -> SequenceTrace | None:
    """Begin the span of a sequence below what `carrier` says, and that of its queue; None if it is not sampled."""
    tracer = tracing.tracer
    if tracer is None:
        return None
    span = tracer.start_span("sequence", context_from(carrier), SpanKind.INTERNAL, start_time=timeline.began_ns)
    if not span.is_recording():
        return None
    span.set_attributes(attributes)
    trace = SequenceTrace(tracer, span, timeline, tracing.max_spans)
    trace.enter("queue", timeline.began_s)
    return trace


def _fail(span: Span, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, error))
