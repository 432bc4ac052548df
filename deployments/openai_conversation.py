"""The fields of a request that make up a conversation: messages, tools, and how the chat template treats them."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployments.chat_template import Conversation
from deployments.openai_fields import parse_content
from deployments.strict_model import RequestBody, StrictModel

MAX_TOOLS = 128


class TextPart(StrictModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


def parse_arguments(value: object) -> dict[str, Any]:
    """Accept the text of a JSON object; none at all counts as an empty one."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise PydanticCustomError("invalid_value", "must be the text of a JSON object")
    return arguments


class CalledFunction(StrictModel):
    """A function that the assistant called."""

    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(parse_arguments, json_schema_input_type=str)]


class ToolCall(StrictModel):
    """A call that an assistant's message made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it: the arguments as an object, as in vLLM."""
        called = {"type": self.type, "function": {"name": self.function.name, "arguments": self.function.arguments}}
        return called if self.id is None else {"id": self.id, **called}


class ChatMessage(StrictModel):
    """One turn of a conversation; text parts are joined into one string."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # Absent is checked like null: only an assistant may say nothing.
    content: str = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    @field_validator("content", mode="plain", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _as_text(cls, value: object, info: ValidationInfo) -> str:
        return parse_content(value, info.data.get("role"))

    @field_validator("tool_calls")
    @classmethod
    def _only_of_assistants(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("unsupported", "is only allowed for an assistant")
        return value

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, without absent fields."""
        given = {"role": self.role, "content": self.content, "name": self.name, "tool_call_id": self.tool_call_id}
        message: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class FunctionDefinition(StrictModel):
    """What a function is called and takes; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("strict")
    @classmethod
    def _is_not_promised(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("unsupported", "cannot be true: calls are not held to their schema")
        return value


class Tool(StrictModel):
    """A function that the template may tell the model of."""

    type: Literal["function"]
    function: FunctionDefinition


class ConversationFields(RequestBody):
    """What the chat template gets to see."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("continue_final_message")
    @classmethod
    def _not_with_a_generation_prompt(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt") is not False:
            raise PydanticCustomError("conflict", "is only allowed when add_generation_prompt is false")
        return value

    @property
    def conversation(self) -> Conversation:
        """The conversation as the template sees it."""
        return Conversation(
            [message.for_template() for message in self.messages],
            [tool.model_dump(exclude_none=True) for tool in self.tools],
            self.add_generation_prompt,
            self.continue_final_message,
            self.chat_template_kwargs,
        )

    @property
    def characters(self) -> int:
        """About how much text the template writes."""
        tools = sum(len(json.dumps(tool.function.parameters or "")) for tool in self.tools)
        return tools + sum(len(message.content) for message in self.messages)
