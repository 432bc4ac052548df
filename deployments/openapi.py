"""What the service says of itself: the OpenAPI description of its endpoints, made from the models that validate."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from pydantic.json_schema import models_json_schema

from deployments.openai_fields import NEUTRAL_IN_MESSAGE
from deployments.openai_schema import ChatCompletionRequest, CompletionRequest
from deployments.openai_tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizePromptRequest
from deployments.openai_types import TOKEN_ID_FORMAT
from deployments.planning import ServingLimits
from deployments.request_headers import TIMEOUT_HEADER
from deployments.strict_model import NeutralValues, RequestBody

Json: TypeAlias = dict[str, Any]
BODIES: Mapping[str, Sequence[type[RequestBody]]] = {
    "/v1/completions": [CompletionRequest],
    "/v1/chat/completions": [ChatCompletionRequest],
    "/tokenize": [TokenizePromptRequest, TokenizeChatRequest],
    "/detokenize": [DetokenizeRequest],
}
SUMMARIES = {
    "/v1/completions": "Complete prompts",
    "/v1/chat/completions": "Continue a conversation",
    "/tokenize": "Tokens of a text or a conversation",
    "/detokenize": "Text of token ids",
    "/v1/models": "The served model",
    "/v1/models/{model}": "The served model, if it has this name",
    "/health": "Whether a target can answer",
    "/ready": "Whether a request sent now would be answered",
    "/status": "Workers, queue and totals of rounds",
    "/metrics": "Metrics in Prometheus' text format",
}
GENERATES = ("/v1/completions", "/v1/chat/completions")
ERRORS = {
    400: "A field or header is missing, unknown or impossible; `param` names it",
    404: "Another model than the served one",
    413: "The body is too large",
    429: "The queue is full; see retry-after",
    500: "The request cannot go on, or the server failed",
    503: "No router or target can answer; see retry-after",
    504: "The request did not finish in time",
}
BY_POST = (400, 404, 413)
BY_GENERATION = (*BY_POST, 429, 500, 503, 504)
BY_GET = {
    "/v1/models": (),
    "/v1/models/{model}": (404,),
    "/health": (503,),
    "/ready": (503,),
    "/status": (503,),
    "/metrics": (503,),
}
ANSWERS = {
    "/v1/completions": "Answer",
    "/v1/chat/completions": "Answer",
    "/tokenize": "TokenizeAnswer",
    "/detokenize": "DetokenizeAnswer",
}
REFERENCE = "#/components/schemas/{model}"


def describe(limits: ServingLimits) -> Json:
    """Return the OpenAPI 3.1 description of a deployment with `limits`."""
    models = [model for models in BODIES.values() for model in models]
    _, shared = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    schemas: Json = shared["$defs"]
    for model in models:
        _admit_what_is_left_out(schemas[model.__name__], model.neutral_only)
    _admit_what_is_left_out(schemas["ChatMessage"], NEUTRAL_IN_MESSAGE, nulls=False)
    _narrow(schemas, limits)
    for internal in ("Grammar", "GrammarKind"):  # what fields become, which pydantic lists without any reference
        schemas.pop(internal, None)
    schemas |= _answer_schemas()
    paths = {path: {"post": _post(path, limits)} for path in BODIES} | {path: {"get": _get(path)} for path in BY_GET}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leadout", "version": _version(), "description": "OpenAI's completions, drafted ahead."},
        "paths": paths,
        "components": {"schemas": schemas},
        "security": [],
    }


def _admit_what_is_left_out(schema: Json, neutral: NeutralValues, nulls: bool = True) -> None:
    """Add to the schema of a body what is taken out of bodies before they are validated: nulls and neutral values."""
    properties = schema["properties"]
    for name in set(properties) - set(schema.get("required", ())) if nulls else ():
        properties[name] = _nullable(properties[name])
    for name, values in neutral.items():
        properties[name] = {"enum": [None, *values], "default": None, "description": "Accepted without effect."}


def _nullable(schema: Json) -> Json:
    default = {name: schema.pop(name) for name in ("default",) if name in schema}
    kinds = schema.get("anyOf", [schema])
    return {"anyOf": kinds if {"type": "null"} in kinds else [*kinds, {"type": "null"}], **default}


def _narrow(schemas: Json, limits: ServingLimits) -> None:
    """Write what this deployment has into the schemas: its model and drafters, and which ids are tokens."""
    for schema in schemas.values():
        for field in _nested(schema):
            if field.get("format") == TOKEN_ID_FORMAT:
                field["maximum"] = limits.vocabulary_size - 1
    for body in (model.__name__ for models in BODIES.values() for model in models):
        schemas[body]["properties"]["model"] = {"enum": [None, limits.served_model_name], "default": None}
    speculation = schemas["SpeculationFields"]["properties"]
    speculation["drafter"] = {"enum": [None, *limits.drafter_names], "default": None}
    most = {"type": "integer", "minimum": 0, "maximum": limits.max_draft_tokens}
    speculation["max_draft_tokens"] = {"anyOf": [most, {"type": "null"}], "default": None}


def _nested(schema: object) -> Iterator[Json]:
    """Yield every object within `schema`."""
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for value in values:
        if isinstance(value, dict):
            yield value
        yield from _nested(value)


def _post(path: str, limits: ServingLimits) -> Json:
    bodies = [{"$ref": REFERENCE.format(model=model.__name__)} for model in BODIES[path]]
    operation = _operation(path, BY_GENERATION if path in GENERATES else BY_POST)
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": bodies[0] if len(bodies) == 1 else {"anyOf": bodies}}},
    }
    if path in GENERATES:
        seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": limits.request_timeout_s}
        description = "Seconds after which the request fails with 504."
        operation["parameters"] = [
            {"name": TIMEOUT_HEADER, "in": "header", "schema": seconds, "description": description}
        ]
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return operation


def _get(path: str) -> Json:
    operation = _operation(path, BY_GET[path])
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/metrics":
        operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return operation


def _operation(path: str, statuses: Sequence[int]) -> Json:
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    refusals = {str(status): {"description": ERRORS[status], "content": error} for status in statuses}
    answer = {"$ref": REFERENCE.format(model=ANSWERS[path])} if path in ANSWERS else {"type": "object"}
    success = {"description": "The answer", "content": {"application/json": {"schema": answer}}}
    return {"summary": SUMMARIES[path], "security": [], "responses": {"200": success, **refusals}}


def _answer_schemas() -> Json:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    number = {"type": "integer", "minimum": 0}
    numbers = {"type": "array", "items": number}
    speculation = _object(
        verifications=number,
        draft_tokens=number,
        accepted_tokens=number,
        accepted_length={"type": "number", "minimum": 0},
        accepted_per_position=numbers,
        drafter=maybe,
        fallback_rounds=number,
    )
    return {
        "Error": _object(error=_object(message=text, type=text, param=maybe, code=maybe)),
        "Usage": _object(
            prompt_tokens=number,
            completion_tokens=number,
            total_tokens=number,
            prompt_tokens_details=_object(cached_tokens=number),
            speculation=speculation,
        ),
        "Answer": _object(
            id=text,
            object={"enum": ["text_completion", "chat.completion"]},
            created=number,
            model=text,
            choices={"type": "array", "items": {"type": "object"}, "minItems": 1},
            usage={"$ref": REFERENCE.format(model="Usage")},
        ),
        "TokenizeAnswer": _object(
            count=number,
            max_model_len=number,
            tokens=numbers,
            token_strs={"anyOf": [{"type": "array", "items": maybe}, {"type": "null"}]},
        ),
        "DetokenizeAnswer": _object(prompt=text),
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _version() -> str:
    try:
        return version("leadout")
    except PackageNotFoundError:
        return "0"
