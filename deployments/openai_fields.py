"""Checks of single request fields that OpenAI defines as unions, and the options that are accepted but not honoured.

A union of pydantic types would answer a wrong value with one message per branch; these validators give one.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from pydantic_core import PydanticCustomError

from deployments.strict_model import NeutralValues
from workers.errors import InvalidRequestError

MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100
MAX_ID_DIGITS = 18

Prompt: TypeAlias = str | tuple[int, ...]

# Options of OpenAI and vLLM that are not honoured yet, with the values that ask for nothing. Null always is one.
# To honour an option, delete its line here and declare the field in openai_schema.py.
NEUTRAL_IN_BOTH: NeutralValues = {
    "length_penalty": (1,),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}
NEUTRAL_IN_COMPLETIONS: NeutralValues = {
    **NEUTRAL_IN_BOTH,
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
NEUTRAL_IN_CHAT: NeutralValues = {
    **NEUTRAL_IN_BOTH,
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "web_search_options": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "moderation": (),
}
# What a client sends back when it repeats an assistant message of ours, or of another OpenAI server.
NEUTRAL_IN_MESSAGE: NeutralValues = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "reasoning_content": (),
    "reasoning": (),
}


def without_neutral(fields: dict[str, Any], neutral: NeutralValues, prefix: str = "") -> dict[str, Any]:
    """Return `fields` without those of `neutral` that ask for nothing; InvalidRequestError for those that ask."""
    for name, values in neutral.items():
        given = fields.get(name)
        if given is not None and not any(_same(given, value) for value in values):
            error = InvalidRequestError(f"{prefix}{name}: this option is not supported.", prefix + name)
            error.code = "unsupported_parameter"
            raise error
    return {name: value for name, value in fields.items() if name not in neutral}


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """Accept a string, a list of ids, or a list of either; return one entry per prompt, each non-empty."""
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif not isinstance(value, list):
        raise _refuse("must be a string, a list of strings, a list of token ids or a list of such lists")
    elif value and all(isinstance(entry, str) for entry in value):
        prompts = tuple(value)
    elif value and all(isinstance(entry, list) for entry in value):
        prompts = tuple(_parse_ids(entry) for entry in value)
    else:
        prompts = (_parse_ids(value),)
    if not all(prompts):
        raise _refuse("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise _refuse(f"holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed")
    return prompts


def parse_stop_strings(value: object) -> tuple[str, ...]:
    """Accept a string or a list of strings, none of them empty."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _refuse("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise _refuse(f"holds {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed")
    if not all(stops):
        raise _refuse("must not contain an empty string")
    return tuple(stops)


def parse_bad_words(value: object) -> tuple[str, ...]:
    """Accept a list of strings, none of them blank; each is returned once."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _refuse("must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise _refuse(f"holds {len(value)} strings; at most {MAX_BAD_WORDS} are allowed")
    if not all(word.strip() for word in value):
        raise _refuse("must not contain a blank string")
    return tuple(dict.fromkeys(value))


def parse_stop_token_ids(value: object) -> tuple[int, ...]:
    """Accept a list of token ids; each is returned once."""
    if not isinstance(value, list) or any(type(token) is not int or token < 0 for token in value):
        raise _refuse("must be a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise _refuse(f"holds {len(value)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    return tuple(dict.fromkeys(value))


def parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Accept an object of biases from -100 to 100 by token id, the ids being strings as in all JSON."""
    if not isinstance(value, dict):
        raise _refuse("must be an object of biases by token id")
    if len(value) > MAX_BIASED_TOKENS:
        raise _refuse(f"holds {len(value)} token ids; at most {MAX_BIASED_TOKENS} are allowed")
    return tuple((_parse_id_key(key), _parse_bias(key, bias)) for key, bias in value.items())


def _parse_id_key(key: str) -> int:
    # Only one way to write a number, so that no id can be given twice.
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS and str(int(key)) == key):
        raise _refuse(f"{key[:40]!r} is not a token id")
    return int(key)


def _parse_bias(key: str, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise _refuse(f"the bias of {key} must be a number from {-MAX_BIAS} to {MAX_BIAS}")
    return float(bias)


def parse_content(value: object, role: str | None) -> str:
    """Accept a string, a list of text parts (joined by newlines as in vLLM), or null for an assistant."""
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if isinstance(value, list):
        return "\n".join(_parse_part(part, index) for index, part in enumerate(value))
    raise _refuse("must be a string or a list of text parts" + (" or null" if role == "assistant" else ""))


def _parse_part(part: object, index: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else None
        raise _refuse(f"part {index}: only parts of type 'text' are supported" + (f", not {kind!r}" if kind else ""))
    text = part.get("text")
    if not isinstance(text, str):
        raise _refuse(f"part {index}: 'text' must be a string")
    return text


def _parse_ids(values: Sequence[object]) -> tuple[int, ...]:
    ids = tuple(value for value in values if type(value) is int)  # a bool is an int to isinstance
    if len(ids) != len(values):
        raise _refuse("must not mix kinds: all strings, all integer token ids, or all lists of token ids")
    if any(token < 0 for token in ids):
        raise _refuse("token ids must not be negative")
    return ids


def _same(given: object, neutral: object) -> bool:
    """Equality as in JSON: numbers equal whatever their kind, but never equal to booleans."""
    return isinstance(given, bool) == isinstance(neutral, bool) and given == neutral


def _refuse(message: str) -> PydanticCustomError:
    # Braces would be read as a template of the error's context.
    return PydanticCustomError("invalid_value", "{reason}", {"reason": message})
