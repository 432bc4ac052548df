"""The fields that ask for structured output: OpenAI's `response_format`, and vLLM's newer and older extensions."""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from deployments.strict_model import RequestBody, StrictModel
from workers.errors import InvalidRequestError
from workers.messages import Grammar, GrammarKind

# A grammar travels with the first message of a sequence to every worker.
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_CHOICES = 1024
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


def parse_schema(value: object) -> Grammar:
    """Accept a JSON schema as an object, or as the text of one."""
    if not isinstance(value, dict | str):
        raise _refuse("must be a JSON schema: an object, or its text")
    return _bounded(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def parse_schema_object(value: object) -> Grammar:
    """Accept a JSON schema as an object."""
    if not isinstance(value, dict):
        raise _refuse("must be a JSON schema, which is an object")
    return parse_schema(value)


def parse_regex(value: object) -> Grammar:
    """Accept a regular expression; whether it is one shows when it is compiled."""
    if not isinstance(value, str):
        raise _refuse("must be a regular expression, which is a string")
    return _bounded(GrammarKind.REGEX, value)


def parse_choices(value: object) -> Grammar:
    """Accept a list of strings, one of which the output is to be."""
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        raise _refuse("must be a list of strings, at least one")
    if len(value) > MAX_CHOICES:
        raise _refuse(f"holds {len(value)} strings; at most {MAX_CHOICES} are allowed")
    return _bounded(GrammarKind.REGEX, "|".join(map(_literally, value)))


def _literally(text: str) -> str:
    """Escape what means something in a regular expression of the grammar engine, and nothing else."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


def _bounded(kind: GrammarKind, source: str) -> Grammar:
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        raise _refuse(f"has {len(source)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    return Grammar(kind, source)


def _parse_unsupported(value: object) -> object:
    if value:
        raise _refuse("this option is not supported")
    return None


def _optional(parse: Callable[[object], Grammar]) -> Callable[[object], Grammar | None]:
    return lambda value: None if value is None else parse(value)


# What is accepted, as far as a JSON schema can say it, and what comes of it.
GrammarText: TypeAlias = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)]
SchemaInput: TypeAlias = dict[str, Any] | GrammarText | None
RegexInput: TypeAlias = GrammarText | None
ChoicesInput: TypeAlias = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None
Schema: TypeAlias = Annotated[
    Grammar | None, PlainValidator(_optional(parse_schema), json_schema_input_type=SchemaInput)
]
Regex: TypeAlias = Annotated[Grammar | None, PlainValidator(_optional(parse_regex), json_schema_input_type=RegexInput)]
Choices: TypeAlias = Annotated[
    Grammar | None, PlainValidator(_optional(parse_choices), json_schema_input_type=ChoicesInput)
]
Unsupported: TypeAlias = Annotated[None, PlainValidator(_parse_unsupported, json_schema_input_type=None)]
SchemaObject: TypeAlias = Annotated[Grammar, PlainValidator(parse_schema_object, json_schema_input_type=dict[str, Any])]


class JsonSchemaFormat(StrictModel):
    """What `response_format` says of a schema. The answer keeps to it whether `strict` or not."""

    name: str
    # `schema` is a method of pydantic's models.
    grammar: SchemaObject = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    # Absent is checked too: a schema is needed by its type, and refused by the others.
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> "ResponseFormat":
        if (self.json_schema is None) is (self.type == "json_schema"):
            needs = "is required with" if self.json_schema is None else "is only allowed with"
            raise _refuse(f"json_schema {needs} type 'json_schema'")
        return self

    @property
    def asked(self) -> tuple[str, Grammar] | None:
        """The field that holds the grammar, and the grammar."""
        if self.json_schema is not None:
            return "response_format.json_schema.schema", self.json_schema.grammar
        return ("response_format", ANY_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`."""

    # `json` is a method of pydantic's models.
    json_grammar: Schema = Field(default=None, alias="json")
    regex: Regex = None
    choice: Choices = None
    json_object: bool | None = None
    grammar: Unsupported = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    # There is one engine and nothing to fall back on.
    disable_fallback: bool | None = None

    @property
    def asked(self) -> list[tuple[str, Grammar]]:
        """The fields that hold a grammar, and the grammars."""
        given = {
            "json": self.json_grammar,
            "regex": self.regex,
            "choice": self.choice,
            "json_object": ANY_OBJECT if self.json_object else None,
        }
        return [(f"structured_outputs.{name}", grammar) for name, grammar in given.items() if grammar is not None]


class StructuredFields(RequestBody):
    """The fields of a request that ask for structured output, at most one of which does."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Regex = None
    guided_choice: Choices = None

    def structured_output(self) -> tuple[str, Grammar] | None:
        """Return what the output must be and the field that says so. InvalidRequestError if several do, or none."""
        given = {
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
        }
        asked = [(name, grammar) for name, grammar in given.items() if grammar is not None]
        if self.response_format is not None and self.response_format.asked is not None:
            asked.append(self.response_format.asked)
        if self.structured_outputs is not None:
            if not self.structured_outputs.asked:
                message = "structured_outputs: one of json, regex, choice and json_object is required."
                raise InvalidRequestError(message, "structured_outputs")
            asked += self.structured_outputs.asked
        if len(asked) > 1:
            names = " and ".join(name for name, _ in asked)
            raise InvalidRequestError(
                f"{asked[-1][0]}: only one structure can be asked for, not {names}.", asked[-1][0]
            )
        return asked[0] if asked else None


def _refuse(message: str) -> PydanticCustomError:
    # Braces would be read as a template of the error's context.
    return PydanticCustomError("invalid_value", "{reason}", {"reason": message})
