"""From a request's sampling options to what the workers apply and what the router watches for."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.openai_schema import GenerationFields
from deployments.text import TextCodec
from workers.errors import InvalidRequestError
from workers.messages import LogitRules, SamplingParams, StopConditions

# The rules travel with the first message of a sequence to every worker.
MAX_BAD_WORD_TOKENS = 4096
# Seeds are told to clients, and many of these read numbers of JSON as doubles.
DRAWN_SEEDS = 2**53


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The options that all sequences of one request share; `end_token_ids` is what ends them."""

    request: GenerationFields
    rules: LogitRules | None
    end_token_ids: frozenset[int]

    def params(self) -> SamplingParams:
        """Return the parameters of a prompt's first choice; the others differ from it in `choice` alone.

        Each prompt is its own request, so a seeded one reads the same alone and in a list; unseeded prompts draw a
        seed each, lest equal prompts give equal texts.
        """
        request = self.request
        seed = request.seed if request.seed is not None else secrets.randbelow(DRAWN_SEEDS)
        return SamplingParams(
            request.temperature, max(request.top_k, 0), request.top_p, seed, min_p=request.min_p, rules=self.rules
        )

    def stop(self, max_tokens: int) -> StopConditions:
        """Return when a sequence with a budget of `max_tokens` ends."""
        return StopConditions(max_tokens, self.end_token_ids, self.request.stop, self.request.min_tokens)


def plan_sampling(request: GenerationFields, codec: TextCodec, vocabulary_size: int) -> SamplingPlan:
    """Check the options against the vocabulary. InvalidRequestError names the option that does not fit."""
    _check_ids("stop_token_ids", request.stop_token_ids, vocabulary_size)
    _check_ids("logit_bias", (token for token, _ in request.logit_bias), vocabulary_size)
    asked = frozenset(request.stop_token_ids)
    # As in vLLM, min_tokens holds EOS back even where it is ignored (SamplingParams.update_from_generation_config).
    # A model's configuration may name an end id that its tokenizer does not have.
    held_back = sorted(token for token in asked | codec.end_token_ids if token < vocabulary_size)
    structure = request.structured_output()
    if structure is not None and not held_back:
        raise InvalidRequestError(f"{structure[0]}: the model has no end token to end the output with.", structure[0])
    rules = LogitRules(
        min_tokens=request.min_tokens,
        end_token_ids=tuple(held_back) if request.min_tokens or structure else (),
        logit_bias=request.logit_bias,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        bad_words=_bad_words(request.bad_words, codec),
        grammar=structure[1] if structure else None,
    )
    return SamplingPlan(
        request,
        rules if rules != LogitRules() else None,
        end_token_ids=asked if request.ignore_eos else asked | codec.end_token_ids,
    )


def _bad_words(words: Iterable[str], codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Return the ids of `words`, as they begin a text and, where that is not caught already, as they follow a space.

    As in vLLM (vllm/sampling_params.py, `SamplingParams.update_from_tokenizer`), which however leaves out a word that
    has more or fewer tokens behind a space, and so lets " Yorkshire" pass where "Yorkshire" is two tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = codec.encode_word(word.lstrip()), codec.encode_word(" " + word.lstrip())
        if not bare:
            raise InvalidRequestError(f"bad_words: {word[:40]!r} has no tokens.", "bad_words")
        sequences[bare] = None
        if spaced[-len(bare) :] != bare:
            sequences[spaced] = None
    tokens = sum(map(len, sequences))
    if tokens > MAX_BAD_WORD_TOKENS:
        message = f"bad_words: {tokens} tokens in all; at most {MAX_BAD_WORD_TOKENS} are allowed."
        raise InvalidRequestError(message, "bad_words")
    return tuple(sequences)


def _check_ids(option: str, ids: Iterable[int], vocabulary_size: int) -> None:
    for token in ids:
        if token >= vocabulary_size:
            message = f"{option}: token id {token} is not below the vocabulary size {vocabulary_size}."
            raise InvalidRequestError(message, option)
