"""The span of an HTTP request, by OpenTelemetry's conventions for generative AI; it lasts until the last byte is sent.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import asyncio
import json
from dataclasses import dataclass, field

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai_responses import AnswerHead, UsageTally
from deployments.openai_schema import GenerationFields
from deployments.request_headers import read_trace_context
from workers.telemetry.tracing import Tracing, carrier_of, context_from

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
PROVIDER = "leadout"
_SCOPE_KEY = "leadout.request_span"
_STREAMED_ERROR = b'data: {"error":'


@dataclass
class RequestSpan:
    """The span of a request under way, what is answered, and how that ended."""

    span: Span
    operation: str
    tally: UsageTally | None = None
    status: int = 500
    error: str | None = None
    carrier: dict[str, str] = field(default_factory=dict)

    def describe(self, fields: GenerationFields, head: AnswerHead, tally: UsageTally) -> None:
        """The request is valid: note what it asks for."""
        self.tally = tally
        self.span.update_name(f"{self.operation} {head.model}")
        asked = {
            "gen_ai.request.model": fields.model or head.model,
            "gen_ai.request.max_tokens": fields.token_limit,
            "gen_ai.request.temperature": fields.temperature,
            "gen_ai.request.top_p": fields.top_p,
            "gen_ai.request.seed": fields.seed,
            "gen_ai.request.stream": fields.stream,
            "gen_ai.request.choice.count": fields.n if fields.n > 1 else None,
            "gen_ai.response.id": head.id,
            "gen_ai.response.model": head.model,
        }
        self.span.set_attributes({key: value for key, value in asked.items() if value is not None})

    def note(self, message: Message) -> None:
        """Look at a message to the client: its status, or the error that ends its stream."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body", b"").startswith(_STREAMED_ERROR):
            error = json.loads(message["body"].removeprefix(b"data: "))["error"]
            self.error = error["code"] or error["type"]

    def end(self) -> None:
        """Everything is sent, or nobody is left to send it to."""
        span, tally = self.span, self.tally
        if tally is not None:
            usage = tally.total()
            span.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
            span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
            reasons = [str(reason) for _, reason in sorted(tally.finish_reasons.items())]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("http.response.status_code", self.status)
        error = self.error or (str(self.status) if self.status >= 400 else None)
        if error is not None:
            span.set_attribute("error.type", error)
        # By the conventions of HTTP a client's mistake is no error of the server.
        if self.error not in (None, "cancelled") or (self.status >= 500 and self.error is None):
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()


class RequestSpans:
    """Middleware that makes the spans. Behind the check of API keys: strangers cannot have anything traced."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self._tracer = tracing.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        operation = None if self._tracer is None or scope["type"] != "http" else _operation(scope)
        if operation is None or self._tracer is None:
            await self.app(scope, receive, send)
            return
        request = _begin(self._tracer, scope, operation)
        scope[_SCOPE_KEY] = request
        if not request.span.is_recording():
            await self.app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            request.note(message)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            # Ray Serve's proxy cancels the answers of clients that have left.
            request.error = "cancelled"
            raise
        finally:
            request.end()


def trace_context(scope: Scope, otherwise: dict[str, str]) -> dict[str, str]:
    """Return what the router needs to nest its spans in the request's; `otherwise` if the request has none."""
    request: RequestSpan | None = scope.get(_SCOPE_KEY)
    return otherwise if request is None else request.carrier


def describe_answer(scope: Scope, fields: GenerationFields, head: AnswerHead, tally: UsageTally) -> None:
    """Note on the request's span what is asked for; `tally` is looked at when the answer is sent."""
    request: RequestSpan | None = scope.get(_SCOPE_KEY)
    if request is not None and request.span.is_recording():
        request.describe(fields, head, tally)


def _operation(scope: Scope) -> str | None:
    path: str = scope["path"]
    return OPERATIONS.get(path.removeprefix(scope.get("root_path", "")))


def _begin(tracer: Tracer, scope: Scope, operation: str) -> RequestSpan:
    """Nest in the span of Serve's replica if there is one, else begin where the client's `traceparent` says."""
    inside_serve = get_current_span().get_span_context().is_valid
    context = None if inside_serve else context_from(read_trace_context(Headers(scope=scope)))
    span = tracer.start_span(operation, context, SpanKind.SERVER)
    if span.is_recording():
        span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER})
    return RequestSpan(span, operation, carrier=carrier_of(span))
