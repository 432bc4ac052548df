"""docs/api.md names every field of the models that validate requests, with its default, and no other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.openai_conversation import ChatMessage, ConversationFields
from deployments.openai_fields import NEUTRAL_IN_BOTH, NEUTRAL_IN_CHAT, NEUTRAL_IN_COMPLETIONS, NEUTRAL_IN_MESSAGE
from deployments.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    SpeculationFields,
    StreamOptions,
)
from deployments.openai_tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizePromptRequest
from deployments.openapi import describe
from deployments.strict_model import NeutralValues
from deployments.structured_fields import StructuredOutputs
from tests.deployments.helpers import LIMITS

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
NAME = re.compile(r"`([a-z_]+)`")
# What the page says where the model's default says nothing of itself.
WORDS = {
    "max_tokens": "see below", "best_of": "`n`", "model": "the served model", "seed": "drawn by the server",
    "stop": "none", "speculation": "see below", "response_format": "text", "drafter": "any",
    "max_draft_tokens": "the deployment's", "verification": "the deployment's", "top_logprobs": "0",
}  # fmt: skip


def section(title: str) -> str:
    """The text under a heading, up to the next one of its rank or above."""
    level, body = re.search(rf"^(#+) {re.escape(title)}\n(.*)", TEXT, re.M | re.S).groups()  # type: ignore[union-attr]
    return re.split(rf"^#{{1,{len(level)}}} ", body, flags=re.M)[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every row of tables, without headings."""
    for table in re.findall(r"^\|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", text, re.M):
        for line in table.splitlines():
            yield [cell.strip() for cell in line.strip("|").split("|")]


def documented(title: str) -> dict[str, str]:
    """Fields and what the page calls their defaults. A section's own table stands before its first subsection."""
    text = re.split(r"^#", section(title), flags=re.M)[0]
    return {name: cells[2] for cells in rows(text) if len(cells) == 4 for name in NAME.findall(cells[0])}


def default_of(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    extra = field.json_schema_extra
    value: Any = extra["default"] if isinstance(extra, dict) else field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return json.dumps(value).replace(".0", "")


FIELDS: list[tuple[str, type[BaseModel], set[str]]] = [
    ("Fields of both endpoints", GenerationFields, set(GenerationFields.model_fields)),
    ("Completions only", CompletionRequest, set(CompletionRequest.model_fields) - set(GenerationFields.model_fields)),
    ("Chat only", ChatCompletionRequest, set(ChatCompletionRequest.model_fields) - set(GenerationFields.model_fields)),
    ("`speculation`", SpeculationFields, set(SpeculationFields.model_fields)),
]


@pytest.mark.parametrize(("title", "model", "fields"), FIELDS, ids=lambda value: value if type(value) is str else "")
def test_every_field_is_documented_with_its_default_and_no_other(
    title: str, model: type[BaseModel], fields: set[str]
) -> None:
    told = documented(title)
    assert set(told) == fields
    said = {name: WORDS.get(name) or default_of(model, name) for name in told}
    assert {name: default.replace(".0", "") for name, default in told.items()} == said


def test_words_stand_only_for_defaults_that_the_models_have_not() -> None:
    fields = {name: model.model_fields[name] for _, model, names in FIELDS for name in names}
    assert set(WORDS) <= set(fields)
    for name, words in WORDS.items():
        assert words and fields[name].get_default(call_default_factory=True) in (None, (), SpeculationFields())


def test_the_fields_of_token_endpoints_are_documented() -> None:
    told = {name for cells in rows(section("Tokens")) for name in NAME.findall(cells[0])}
    assert told == {*TokenizePromptRequest.model_fields, *TokenizeChatRequest.model_fields}
    assert set(ConversationFields.model_fields) <= told
    prose = section("Tokens")
    named = {*DetokenizeRequest.model_fields, *TokenizeChatRequest.neutral_only}
    assert all(f"`{name}`" in prose for name in named)


def test_nested_fields_are_documented() -> None:
    assert all(f"`{name}`" in section("Chat only") for name in ChatMessage.model_fields)
    assert all(f'"{name}"' in section("Fields of both endpoints") for name in StreamOptions.model_fields)
    outputs = section("Structured output")
    names = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    honoured = {name for name in names if f'"{name}"' in outputs}
    assert honoured == {"json", "json_object", "regex", "choice"}


def stated_neutral(text: str) -> dict[str, list[str]]:
    """Options and their neutral values, of tables whose columns go in pairs."""
    found: dict[str, list[str]] = {}
    for cells in rows(text):
        for names, values in zip(cells[::2], cells[1::2], strict=False):
            found |= {name: [] if values == "\u2013" else values.split(", ") for name in NAME.findall(names)}
    return found


def in_words(neutral: NeutralValues) -> dict[str, list[str]]:
    return {name: [json.dumps(value) for value in values] for name, values in neutral.items()}


def test_options_that_must_ask_for_nothing_are_listed_with_the_values_that_do() -> None:
    told = section("Options that are accepted only when they ask for nothing")
    both, completions, chat, message = re.split(r"^(?:Completions|Chat|Messages):", told, flags=re.M)
    only_completions = {name: NEUTRAL_IN_COMPLETIONS[name] for name in NEUTRAL_IN_COMPLETIONS.keys() - NEUTRAL_IN_BOTH}
    only_chat = {name: NEUTRAL_IN_CHAT[name] for name in NEUTRAL_IN_CHAT.keys() - NEUTRAL_IN_BOTH}
    assert stated_neutral(both) == in_words(NEUTRAL_IN_BOTH)
    assert stated_neutral(completions) == in_words(only_completions)
    assert stated_neutral(chat) == in_words(only_chat)
    assert set(NAME.findall(message)) == set(NEUTRAL_IN_MESSAGE)


def test_the_endpoints_are_those_of_the_description() -> None:
    listed = {path for cells in rows(section("Endpoints")) for path in re.findall(r"`(?:GET|POST) ([^`]+)`", cells[0])}
    assert listed == {*describe(LIMITS)["paths"], "/openapi.json"}
