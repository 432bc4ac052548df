"""The HTTP application: OpenAI-compatible endpoints over a generation service. Knows nothing of Ray."""

import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.access import AccessControl
from deployments.detokenize_endpoint import DetokenizeEndpoint
from deployments.draining import Drain, DrainGate
from deployments.generation import ChoiceDelta, GenerationService, generate_choices
from deployments.grammar_check import GrammarCheck
from deployments.health_endpoint import HealthEndpoint, router_status
from deployments.http_errors import EXCEPTION_HANDLERS, ErrorBoundary
from deployments.logprobs import chat_logprobs, completion_logprobs, no_logprobs
from deployments.metrics_endpoint import MetricsEndpoint
from deployments.openai_responses import (
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    UsageTally,
    answer_id,
    join_choices,
    model_card,
)
from deployments.openai_schema import ChatCompletionRequest, CompletionRequest, GenerationFields, parse_request
from deployments.openapi import describe
from deployments.planning import AnswerPlan, Planner, ServingLimits
from deployments.request_body import read_json_object
from deployments.request_headers import RequestContext, read_context
from deployments.request_span import RequestSpans, describe_answer, trace_context
from deployments.streaming import EventStream, answer_events, run_while_connected
from deployments.text import TextCodec
from deployments.tokenize_endpoint import TokenizeEndpoint
from workers.telemetry.tracing import NO_TRACING, Tracing

__all__ = ["ServingLimits", "create_app"]

WORKER_STATS_TIMEOUT_S = 6.0
PROBES = ["GET", "HEAD"]


def create_app(
    service: GenerationService,
    codec: TextCodec,
    limits: ServingLimits,
    drain: Drain | None = None,
    names_requests: bool = True,
    tracing: Tracing = NO_TRACING,
) -> FastAPI:
    """Return the application that answers with `service`, until `drain` begins.

    With `names_requests` false, whoever stands in front of the application puts `x-request-id` on its responses.
    """
    drain = drain or Drain()
    endpoints = Endpoints(service, codec, limits)
    app = FastAPI(
        title="Leadout",
        openapi_url=None,  # bodies are validated outside of FastAPI: its own description would be hollow
        telemetry={"tracing": False, "metrics": False, "logs": False},  # its span would stand beside Serve's, not below
        middleware=[
            Middleware(ErrorBoundary, names_requests=names_requests),
            Middleware(DrainGate, drain=drain),
            Middleware(AccessControl, rules=limits.access),
            Middleware(RequestSpans, tracing=tracing),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.add_api_route("/v1/completions", endpoints.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"], response_model=None)
    tokenize, detokenize = TokenizeEndpoint(codec, limits), DetokenizeEndpoint(codec, limits)
    app.add_api_route("/tokenize", tokenize.tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", detokenize.detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", endpoints.models, response_model=None)
    app.add_api_route("/v1/models/{model:path}", endpoints.model, response_model=None)
    health = HealthEndpoint(service, drain)
    app.add_api_route("/health", health.health, methods=PROBES, response_model=None)
    app.add_api_route("/ready", health.ready, methods=PROBES, response_model=None)
    app.add_api_route("/status", endpoints.status, response_model=None)
    app.add_api_route("/metrics", MetricsEndpoint(service).metrics, response_model=None)
    app.add_api_route("/openapi.json", endpoints.openapi, response_model=None)
    return app


class Endpoints:
    """The handlers, with what they share."""

    def __init__(self, service: GenerationService, codec: TextCodec, limits: ServingLimits) -> None:
        self._service = service
        self._codec = codec
        self._limits = limits
        self._planner = Planner(codec, limits, GrammarCheck(codec.backend.to_str))
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        fields = parse_request(CompletionRequest, await self._body(request))
        head = AnswerHead(answer_id("cmpl"), self._limits.served_model_name)
        plan = await self._planner.plan_completion(fields, head.id, self._context(request))
        wording = no_logprobs if fields.likeliest_tokens is None else completion_logprobs(self._codec.token_bytes)
        form = CompletionFormat(head, plan.seeds, fields.return_token_ids, wording)
        return await self._answer(request, fields, plan, form)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        fields = parse_request(ChatCompletionRequest, await self._body(request))
        head = AnswerHead(answer_id("chatcmpl"), self._limits.served_model_name)
        plan = await self._planner.plan_chat(fields, head.id, self._context(request))
        wording = no_logprobs if fields.likeliest_tokens is None else chat_logprobs(self._codec.token_bytes)
        form = ChatFormat(head, plan.seeds, fields.return_token_ids, wording)
        return await self._answer(request, fields, plan, form)

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, model: str) -> Response:
        """GET /v1/models/{model}."""
        self._limits.check_model(model)
        return JSONResponse(self._card())

    async def status(self) -> Response:
        """GET /status: workers, their free KV blocks, queue lengths and where the time of rounds went."""
        status = await router_status(self._service, WORKER_STATS_TIMEOUT_S, with_worker_stats=True)
        return JSONResponse(asdict(status))

    async def openapi(self) -> Response:
        """GET /openapi.json: what the endpoints take and answer."""
        return JSONResponse(describe(self._limits))

    async def _answer(
        self, request: Request, fields: GenerationFields, plan: AnswerPlan, form: AnswerFormat
    ) -> Response:
        choices = generate_choices(self._service, self._codec, plan.sequences, plan.echoed)
        tally = UsageTally(plan.prompt_tokens, fields.n)
        describe_answer(request.scope, fields, form.head, tally)
        if fields.stream:
            # What fails before the first delta is still an ordinary response with its own status.
            first = await run_while_connected(request.receive, take_first(choices))
            events = answer_events(form, first, choices, tally, fields.include_usage)
            return EventStream(events, choices)

        async def collect() -> list[ChoiceDelta]:
            return [item async for item in choices]

        deltas = await run_while_connected(request.receive, collect())
        for item in deltas:
            tally.add(item)
        return JSONResponse(form.answer(join_choices(deltas), tally.total()))

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json_object(request, self._limits.max_body_bytes)

    def _context(self, request: Request) -> RequestContext:
        context = read_context(request.headers, self._limits.request_timeout_s)
        return replace(context, trace_context=trace_context(request.scope, context.trace_context))

    def _card(self) -> dict[str, Any]:
        return model_card(self._limits.served_model_name, self._limits.context_length, self._created)


async def take_first(choices: AsyncGenerator[ChoiceDelta, None]) -> ChoiceDelta:
    """Return the first delta, waiting until there is one."""
    return await anext(choices)
