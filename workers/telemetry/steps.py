"""The spans of a worker's steps: one in the trace of each sampled request whose sequence takes part."""

import time
from collections.abc import Callable
from typing import TypeVar

from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, Tracer, get_current_span

from workers.messages import (
    DraftAheadItem,
    DraftAheadRequest,
    DraftAheadResponse,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRequest,
    WorkerResponse,
)
from workers.telemetry.sequence_trace import Attributes
from workers.telemetry.tracing import NO_TRACING, Tracing, context_from

MOST_LINKS = 16
"""A step's span links so many of the other requests that share the step; how many do it says anyway."""
R = TypeVar("R", bound="WorkerResponse | None")


class StepSpans:
    """Makes the spans of one worker's steps. Where nothing is traced, or nobody sampled takes part, it does nothing."""

    def __init__(self, tracing: Tracing = NO_TRACING, worker_id: str = "") -> None:
        self._tracer = tracing.tracer
        self._worker_id = worker_id

    def around(self, message: WorkerRequest, answer: Callable[[], R]) -> R:
        """Return what `answer` returns, having made the spans of that step."""
        if self._tracer is None or not (parents := _parents(message)):
            return answer()
        began_ns = time.time_ns()
        try:
            response = answer()
        except Exception as error:
            self._record(self._tracer, message, parents, began_ns, None, type(error).__name__)
            raise
        self._record(self._tracer, message, parents, began_ns, response, None)
        return response

    def _record(
        self,
        tracer: Tracer,
        message: WorkerRequest,
        parents: dict[int, str],
        began_ns: int,
        response: WorkerResponse | None,
        error: str | None,
    ) -> None:
        ended_ns = time.time_ns()
        shared = {"leadout.worker.id": self._worker_id, **_step_attributes(message, response)}
        contexts = {index: context_from({"traceparent": parent}) for index, parent in parents.items()}
        rounds = {index: get_current_span(context).get_span_context() for index, context in contexts.items()}
        for index, context in contexts.items():
            span = tracer.start_span(
                _NAMES[type(message)],
                context,
                SpanKind.SERVER,
                {**shared, **_item_attributes(message, index)},
                _links(rounds, index),
                began_ns,
            )
            if error is not None:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(ended_ns)


_NAMES: dict[type, str] = {
    ProposeRequest: "draft.step",
    DraftAheadRequest: "draft_ahead.step",
    VerifyRequest: "verify.step",
}


def _parents(message: WorkerRequest) -> dict[int, str]:
    """Return the `traceparent` of each sampled item by its index."""
    return {index: item.trace_parent for index, item in enumerate(_items(message)) if item.trace_parent is not None}


def _items(message: WorkerRequest) -> tuple[ProposeItem | DraftAheadItem | VerifyItem, ...]:
    match message:
        case ProposeRequest(items) | DraftAheadRequest(items) | VerifyRequest(items):
            return items
        case _:
            return ()


def _links(rounds: dict[int, SpanContext], mine: int) -> list[Link]:
    others = [context for index, context in rounds.items() if index != mine and context.is_valid]
    return [Link(context) for context in others[:MOST_LINKS]]


def _step_attributes(message: WorkerRequest, response: WorkerResponse | None) -> Attributes:
    items = _items(message)
    attributes: dict[str, str | int | float | bool] = {
        "leadout.step.sequences": len(items),
        "leadout.step.committed_tokens": sum(len(item.committed) for item in items),
    }
    if isinstance(response, ProposeResponse | DraftAheadResponse | VerifyResponse):
        attributes["leadout.step.compute_ms"] = response.compute_ms
    if isinstance(response, VerifyResponse):
        attributes["leadout.step.read_tokens"] = response.read_tokens
    return attributes


def _item_attributes(message: WorkerRequest, index: int) -> Attributes:
    item = _items(message)[index]
    drafts = len(item.proposal) if isinstance(item, VerifyItem) else item.draft_tokens
    return {"leadout.epoch": item.epoch, "leadout.draft_tokens": drafts}
