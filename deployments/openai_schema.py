"""What clients may ask, in OpenAI's fields: strict models that refuse what is unknown, wrong or not honoured."""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from deployments.openai_conversation import ConversationFields
from deployments.openai_fields import NEUTRAL_IN_CHAT, NEUTRAL_IN_COMPLETIONS, NEUTRAL_IN_MESSAGE, without_neutral
from deployments.openai_types import BadWords, LogitBias, Prompts, StopStrings, StopTokenIds
from deployments.strict_model import NeutralValues, RequestBody, StrictModel
from deployments.structured_fields import StructuredFields
from workers.errors import InvalidRequestError

MAX_DRAFT_TOKENS = 32
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_CACHE_SALT_CHARACTERS = 256


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None


MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class SpeculationFields(StrictModel):
    """The extension `speculation`: how one request wants to be drafted for."""

    enabled: bool = True
    max_draft_tokens: int | None = Field(default=None, ge=0, le=MAX_DRAFT_TOKENS)
    verification: Literal["coupled", "ratio"] | None = None
    drafter: str | None = None


class GenerationFields(StructuredFields):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=MAX_TOP_K)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: StopStrings = ()
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: LogitBias = Field(default=(), json_schema_extra={"default": {}})
    # The options from here to `stream` are vLLM's extensions and mean what they mean there.
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    bad_words: BadWords = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields = SpeculationFields()
    # vLLM's extension: every choice also carries the ids of its tokens, hidden ones included.
    return_token_ids: bool = False
    # vLLM's extension: KV is shared only with requests that have the same salt.
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)
    # `domain` names the class of traffic by which drafters are chosen; the rest is the client's own affair.
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=MAX_METADATA)
    # Accepted for the sake of clients that send them; they change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("best_of")
    @classmethod
    def _no_more_than_are_returned(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n", value):
            raise PydanticCustomError("unsupported", "must equal n; choosing the best of more is not supported")
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_when_streaming(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and info.data.get("stream") is False:
            raise PydanticCustomError("unsupported", "is only allowed when stream is true")
        return value

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants; None leaves it to the endpoint's default."""
        return self.max_tokens

    @property
    def traffic_class(self) -> str:
        """The kind of text that the client says it asks for; empty if it does not say."""
        return self.metadata.get("domain", "")

    @property
    def likeliest_tokens(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None for no report of any token."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is one entry per choice: text, or token ids used as they are."""

    neutral_only: ClassVar[NeutralValues] = NEUTRAL_IN_COMPLETIONS

    prompt: Prompts
    # Nothing at all may be generated where the prompt is echoed.
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @property
    def likeliest_tokens(self) -> int | None:
        """OpenAI's `logprobs` of completions is a number."""
        return self.logprobs


class ChatCompletionRequest(GenerationFields, ConversationFields):
    """POST /v1/chat/completions. `max_completion_tokens` is OpenAI's later name of `max_tokens`."""

    neutral_only: ClassVar[NeutralValues] = NEUTRAL_IN_CHAT

    # What the model writes is text, calls of tools included; nothing is parsed out of it.
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @field_validator("tool_choice")
    @classmethod
    def _only_with_tools(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == "auto" and not info.data.get("tools", True):
            raise PydanticCustomError("unsupported", "is only allowed with tools")
        return value

    @field_validator("parallel_tool_calls")
    @classmethod
    def _nothing_forbids_calls(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("tools"):
            raise PydanticCustomError("unsupported", "cannot be false: calls are not restricted")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("logprobs") is False:
            raise PydanticCustomError("unsupported", "is only allowed when logprobs is true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees_with_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") not in (None, value):
            raise PydanticCustomError("conflict", "differs from max_tokens; give only one of them")
        return value

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants; None means what is left of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def likeliest_tokens(self) -> int | None:
        """OpenAI's `logprobs` of chats is a switch, with a number beside it."""
        return (self.top_logprobs or 0) if self.logprobs else None


RequestModel = TypeVar("RequestModel", bound=RequestBody)


def parse_request(model: type[RequestModel], body: dict[str, Any]) -> RequestModel:
    """Validate a JSON object; InvalidRequestError names the first field that is wrong. Null means absent."""
    fields = without_neutral(body, model.neutral_only)
    fields = {name: value for name, value in fields.items() if value is not None or name not in model.model_fields}
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_without_neutral_message(*entry) for entry in enumerate(fields["messages"])]
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from None


def _without_neutral_message(index: int, message: object) -> object:
    if not isinstance(message, dict):
        return message
    return without_neutral(message, NEUTRAL_IN_MESSAGE, f"messages[{index}].")


def _explain(detail: ErrorDetails) -> InvalidRequestError:
    param = _dotted(detail["loc"])
    match detail["type"]:
        case "missing":
            reason = "is required"
        case "extra_forbidden":
            reason = "is not a known field"
        case "model_type":
            reason = "must be a JSON object"
        case "too_short":
            reason = "must not be empty"
        case "too_long":
            reason = f"holds more than the {detail['ctx']['max_length']} entries that are allowed"
        case _:
            reason = detail["msg"].replace("Input should be", "must be")
    return InvalidRequestError(f"{param or 'body'}: {reason}.", param or None)


def _dotted(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
