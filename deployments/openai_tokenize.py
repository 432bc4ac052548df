"""What clients may ask of /tokenize and /detokenize, in vLLM's fields."""

from typing import ClassVar

from deployments.openai_conversation import ConversationFields
from deployments.openai_types import TokenId
from deployments.strict_model import NeutralValues, RequestBody


class TokenizePromptRequest(RequestBody):
    """POST /tokenize of a text, as /v1/completions reads it."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ConversationFields):
    """POST /tokenize of a conversation, as /v1/chat/completions reads it."""

    neutral_only: ClassVar[NeutralValues] = {
        "add_special_tokens": (False,),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
