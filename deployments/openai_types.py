"""Types of request fields that OpenAI defines as unions: what is accepted, in a JSON schema, and what comes of it."""

from typing import Annotated, TypeAlias

from pydantic import Field, PlainValidator

from deployments.openai_fields import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_ID_DIGITS,
    MAX_PROMPTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Prompt,
    parse_bad_words,
    parse_logit_bias,
    parse_prompts,
    parse_stop_strings,
    parse_stop_token_ids,
)

NonEmpty: TypeAlias = Annotated[str, Field(min_length=1)]
NonBlank: TypeAlias = Annotated[str, Field(pattern=r"\S")]
# Marks token ids in the schema, where the size of a model's vocabulary can then be added.
TOKEN_ID_FORMAT = "token-id"
TokenId: TypeAlias = Annotated[int, Field(ge=0, json_schema_extra={"format": TOKEN_ID_FORMAT})]
TokenIdKey: TypeAlias = Annotated[str, Field(pattern=rf"^(0|[1-9][0-9]{{0,{MAX_ID_DIGITS - 1}}})$")]
Bias: TypeAlias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
OnePrompt: TypeAlias = Annotated[list[TokenId], Field(min_length=1)]

PromptInput: TypeAlias = (
    NonEmpty
    | Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_PROMPTS)]
    | OnePrompt
    | Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]
)
StopInput: TypeAlias = NonEmpty | Annotated[list[NonEmpty], Field(max_length=MAX_STOP_STRINGS)]
BadWordsInput: TypeAlias = Annotated[list[NonBlank], Field(max_length=MAX_BAD_WORDS)]
TokenIdsInput: TypeAlias = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
BiasInput: TypeAlias = Annotated[
    dict[TokenIdKey, Bias], Field(max_length=MAX_BIASED_TOKENS, json_schema_extra={"additionalProperties": False})
]

Prompts: TypeAlias = Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts, json_schema_input_type=PromptInput)]
StopStrings: TypeAlias = Annotated[
    tuple[str, ...], PlainValidator(parse_stop_strings, json_schema_input_type=StopInput)
]
BadWords: TypeAlias = Annotated[tuple[str, ...], PlainValidator(parse_bad_words, json_schema_input_type=BadWordsInput)]
StopTokenIds: TypeAlias = Annotated[
    tuple[int, ...], PlainValidator(parse_stop_token_ids, json_schema_input_type=TokenIdsInput)
]
LogitBias: TypeAlias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(parse_logit_bias, json_schema_input_type=BiasInput)
]
