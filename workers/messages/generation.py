"""Between ingress and router: what a client asks for, and the tokens it gets."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from workers.messages.arrays import Float32s, TokenIds

BANNING_BIAS = -100.0
"""The smallest bias. OpenAI says that it should ban a token; added to a large logit it might not, so it is a ban."""


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be as a whole: JSON for a schema (as JSON text), or a match of a regular expression."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What happens to single logits before the temperature; each default asks for nothing.

    The ids in `end_token_ids` cannot be drawn before `min_tokens` tokens were generated. `logit_bias` is pairs of a
    token id, each at most once, and what is added to its logit; -100 (`BANNING_BIAS`) bans the token.

    `repetition_penalty` (above 0) divides the positive logits and multiplies the others of every token of prompt or
    output so far; `frequency_penalty` is subtracted as often as the token stands in the output, and
    `presence_penalty` once if it does.

    `bad_words` are token ids, none empty, that the output never holds in a row.

    With a `grammar` the output keeps to it, and the ids in `end_token_ids`, at least one, can be drawn where it may end
    and nowhere else; `min_tokens` then yields to an output that cannot go on.
    """

    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the target's distribution.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. `seed` (0 to 2**63 - 1)
    and `choice` (the index among n choices) select the noise of the sequence. `rules` is None in the common case that
    there are none: nothing is sent, remembered or computed for them then.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    rules: LogitRules | None = None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends. Ids in `end_token_ids` (EOS and the like) are counted but never shown.

    Nothing but `max_tokens` ends it before it has more than `min_tokens` tokens. With `max_tokens` 0 the prompt is only
    read, and scored if that is asked for.
    """

    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0


class Verification(StrEnum):
    """How drafts are accepted: by the target's own draws (coupled), or by the ratio of probabilities."""

    COUPLED = "coupled"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What one request asks of speculation; None leaves the choice to the deployment."""

    enabled: bool = True
    max_draft_tokens: int | None = None
    drafter: str | None = None
    verification: Verification | None = None


@dataclass(frozen=True, slots=True)
class SpeculationUsage:
    """What speculation did for one sequence. Draft counts never include corrections or bonus tokens.

    `cached_prompt_tokens`: how many of the prompt's tokens the target that first read it had cached already.
    """

    verifications: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafter: str | None = None
    fallback_rounds: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Resumption:
    """What is known of a sequence whose router was lost: another one goes on behind it, and tells none of it again.

    `committed` int32 are the tokens of the output so far, none of which ended it; `scored_prompt_tokens` is how many
    log-probabilities of the prompt were told.
    """

    committed: TokenIds
    usage: SpeculationUsage = SpeculationUsage()
    scored_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, as the ingress hands it to the router.

    With `logprobs` n, every token comes with its log-probability and the n likeliest tokens of its position (n may be
    0); None asks for nothing. `prompt_logprobs` asks for the same of the prompt's tokens.

    KV is shared only with requests of the same `cache_salt`, so that nobody can time what others have sent.
    `traffic_class` groups requests that drafters may be unequally good at. With a `resumption` the request was admitted
    before, so it is not refused for want of a place in the queue.
    """

    request_id: str
    prompt: TokenIds
    sampling: SamplingParams
    stop: StopConditions
    speculation: SpeculationOptions = SpeculationOptions()
    timeout_s: float = 600.0
    trace_context: dict[str, str] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    cache_salt: str | None = None
    traffic_class: str = ""
    resumption: Resumption | None = None

    @property
    def is_answered(self) -> bool:
        """Whether another router has told tokens of it already."""
        return self.resumption is not None and len(self.resumption.committed) > 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at t consecutive positions, of the model itself: before rules, temperature, filters.

    `chosen` float32 [t] belongs to the tokens that stand there; `top_ids` int32 and `top` float32 [t, n] are the n
    likeliest tokens of each position, the likeliest first. A probability of 0 is -inf.
    """

    chosen: Float32s
    top_ids: TokenIds
    top: Float32s

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, positions: slice) -> "TokenLogprobs":
        return TokenLogprobs(self.chosen[positions], self.top_ids[positions], self.top[positions])


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens committed in one round, in order.

    `visible_characters` bounds the text of the whole completion that may be shown so far; None means all of it
    (no stop string is being watched). `finish_reason` is set on the last chunk only; `usage` counts from the first on.

    `logprobs` belongs to `token_ids`. `prompt_logprobs` belongs to the prompt's tokens from its second on, in pieces
    that come in order, each once, before or with the first tokens; `token_ids` may then be empty.
    """

    token_ids: TokenIds
    visible_characters: int | None = None
    finish_reason: FinishReason | None = None
    usage: SpeculationUsage | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """The end of a sequence that could not be finished: `status` is the HTTP status the client should see."""

    status: int
    code: str
    message: str


GenerationEvent: TypeAlias = TokenChunk | GenerationFailed
