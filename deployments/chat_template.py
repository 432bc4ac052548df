"""A model's chat template: from a conversation to the text that the model reads."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from workers.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What transformers adds to Jinja; all that matters here is which variables stand between the tags.
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
# What templates get from elsewhere, and the arguments of `apply_chat_template` itself.
RESERVED_VARIABLES = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now",
        "conversation", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a client gives the template, as the template sees it. `variables` are further ones that it knows."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


def render(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> str:
    """Return the text of `conversation`, special tokens included.

    InvalidRequestError (param "messages") if the model has no chat template or the template refuses; it names what
    the conversation asks for and the template would ignore.
    """
    if not tokenizer.chat_template:
        raise InvalidRequestError("The model has no chat template; use /v1/completions instead.", "messages")
    tools: list[Any] | None = [dict(tool) for tool in conversation.tools] or None
    try:
        template: str = tokenizer.get_chat_template(tools=tools)
        known = _variables(template)
    except Exception as error:
        raise _refusal(error) from error
    _check_is_heard(conversation, template, known)
    try:
        text = tokenizer.apply_chat_template(
            [_as_template_sees(message, template) for message in conversation.messages],
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )
    except Exception as error:  # a template is a program over the client's data: whatever it raises is its verdict
        raise _refusal(error) from error
    return str(text)


def _refusal(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"The model's chat template refused: {error}", "messages")


def _check_is_heard(conversation: Conversation, template: str, known: frozenset[str]) -> None:
    """InvalidRequestError for what the template would drop without a word."""
    if conversation.tools and "tools" not in known:
        raise InvalidRequestError("tools: the model's chat template does not support tools.", "tools")
    for index, message in enumerate(conversation.messages):
        if message.get("tool_calls") and "tool_calls" not in template:
            param = f"messages[{index}].tool_calls"
            raise InvalidRequestError(f"{param}: the model's chat template does not support tool calls.", param)
    for name in conversation.variables:
        if name in RESERVED_VARIABLES or name not in known:
            reason = "cannot be set" if name in RESERVED_VARIABLES else "is not known to the model's chat template"
            param = "chat_template_kwargs"
            raise InvalidRequestError(f"{param}: {name[:40]!r} {reason}.", param)


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """Return the variables that the template reads and does not set itself."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", template))))


def _as_template_sees(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    # Most templates know no "developer", OpenAI's later name for the system role, and would drop its message silently.
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return dict(message)
