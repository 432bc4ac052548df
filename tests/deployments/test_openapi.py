"""The served description: it fits the application, and its bodies are those that the endpoints take."""

from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from deployments.http_app import create_app
from deployments.openapi import describe
from deployments.text import TextCodec
from tests.deployments.helpers import CHAT, COMPLETIONS, LIMITS
from tests.fakes import ScriptedService

DESCRIPTION = describe(LIMITS)
USER = {"role": "user", "content": "hi"}


def fits(path: str, body: dict[str, Any]) -> bool:
    schema = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": DESCRIPTION["components"]})
    return bool(validator.is_valid(body))


def test_every_route_is_described_with_its_methods(service: ScriptedService, codec: TextCodec) -> None:
    app = create_app(service, codec, LIMITS)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert routes == described | {("/openapi.json", "get")}


def test_schemas_are_schemas_and_nothing_asks_for_credentials() -> None:
    for schema in DESCRIPTION["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [operation for methods in DESCRIPTION["paths"].values() for operation in methods.values()]
    assert DESCRIPTION["security"] == [] and all(operation["security"] == [] for operation in operations)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_every_refusal_has_openais_shape(path: str) -> None:
    responses = DESCRIPTION["paths"][path]["post"]["responses"]
    assert {"200", "400", "404", "413"} <= set(responses)
    assert {"429", "503", "504"} <= set(responses) or path not in (COMPLETIONS, CHAT)
    errors = [told["content"]["application/json"]["schema"] for status, told in responses.items() if status != "200"]
    assert all(error == {"$ref": "#/components/schemas/Error"} for error in errors)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "tiny", "temperature": None, "stop": ["x"], "suffix": ""}),
        (COMPLETIONS, {"prompt": [[5, 256], [6]], "logit_bias": {"7": -100}, "max_tokens": 0, "echo": True}),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "a+", "metadata": {"domain": "code"}, "bad_words": ["x"]}),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"type": "object"}, "regex": None}}),
        (COMPLETIONS, {"prompt": "a", "speculation": {"drafter": "scripted", "max_draft_tokens": 8}}),
        (CHAT, {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, "store": False}),
        (CHAT, {"messages": [{"role": "assistant"}, {**USER, "content": [{"type": "text", "text": "a"}]}]}),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}, "tool_choice": "none"}),
        ("/tokenize", {"prompt": ""}),
        ("/tokenize", {"messages": [USER], "add_special_tokens": False}),
        ("/detokenize", {"tokens": [0, 256]}),
    ],
)  # fmt: skip
def test_bodies_that_are_answered_fit(client: Any, path: str, body: dict[str, Any]) -> None:
    assert fits(path, body)
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [257]}),
        (COMPLETIONS, {"prompt": "a", "model": "nope"}),
        (COMPLETIONS, {"prompt": "a", "n": 17}),
        (COMPLETIONS, {"prompt": "a", "messages": [USER]}),
        (COMPLETIONS, {"prompt": "a", "suffix": "z"}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
        (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}),
        (COMPLETIONS, {"prompt": "a", "speculation": {"drafter": "nope"}}),
        (COMPLETIONS, {"prompt": "a", "speculation": {"max_draft_tokens": 9}}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}),
        (CHAT, {"messages": [USER], "reasoning_effort": "low"}),
        (CHAT, {"messages": [USER], "tool_choice": "required"}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [257]}),
    ],
)
def test_bodies_that_are_refused_do_not_fit(client: Any, path: str, body: dict[str, Any]) -> None:
    assert not fits(path, body)
    assert client.post(path, json=body).status_code in (400, 404)
