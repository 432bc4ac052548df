"""Messages that cross process boundaries: frozen dataclasses of numbers, strings and numpy arrays, nothing else.

Positions are absolute (the first prompt token has position 0). Token arrays are int32, shape [tokens].
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.int32]


def token_ids(values: "list[int] | tuple[int, ...] | TokenIds") -> TokenIds:
    """Return `values` as the int32 array that messages carry."""
    return np.asarray(values, dtype=np.int32)


NO_TOKENS: TokenIds = token_ids([])


# --- what a client asks for ---------------------------------------------------------------------------------


BANNING_BIAS = -100.0
"""The smallest bias. OpenAI says that it should ban a token; added to a large logit it might not, so it is a ban."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What happens to single logits before the temperature; each default asks for nothing.

    The ids in `end_token_ids` cannot be drawn before `min_tokens` tokens were generated. `logit_bias` is pairs of a
    token id, each at most once, and what is added to its logit; -100 (`BANNING_BIAS`) bans the token.

    `repetition_penalty` (above 0) divides the positive logits and multiplies the others of every token of prompt or
    output so far; `frequency_penalty` is subtracted as often as the token stands in the output, and
    `presence_penalty` once if it does.

    `bad_words` are token ids, none empty, that the output never holds in a row.
    """

    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()


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

    Nothing but `max_tokens` ends it before it has more than `min_tokens` tokens.
    """

    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What one request asks of speculation; None leaves the choice to the deployment."""

    enabled: bool = True
    max_draft_tokens: int | None = None
    drafter: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, as the ingress hands it to the router."""

    request_id: str
    prompt: TokenIds
    sampling: SamplingParams
    stop: StopConditions
    speculation: SpeculationOptions = SpeculationOptions()
    timeout_s: float = 600.0
    trace_context: dict[str, str] = field(default_factory=dict)


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SpeculationUsage:
    """What speculation did for one sequence. Draft counts never include corrections or bonus tokens."""

    verifications: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafter: str | None = None
    fallback_rounds: int = 0


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens committed in one round, in order.

    `visible_characters` bounds the text of the whole completion that may be shown so far; None means all of it
    (no stop string is being watched). `finish_reason` and `usage` are set on the last chunk only.
    """

    token_ids: TokenIds
    visible_characters: int | None = None
    finish_reason: FinishReason | None = None
    usage: SpeculationUsage | None = None


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """The end of a sequence that could not be finished: `status` is the HTTP status the client should see."""

    status: int
    code: str
    message: str


GenerationEvent: TypeAlias = TokenChunk | GenerationFailed


# --- router <-> drafter -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain of draft tokens for one sequence: `token_ids` int32 [k], for positions L to L + k - 1."""

    token_ids: TokenIds

    def __len__(self) -> int:
        return len(self.token_ids)


NO_PROPOSAL = Proposal(NO_TOKENS)


@dataclass(frozen=True, slots=True)
class ProposeItem:
    """Commits since last time, and how many tokens to draft after them.

    The drafter first forgets its KV entries from `first_position` on, which is the whole of a rollback, then reads
    `committed` (at positions from `first_position`) and drafts `draft_tokens` tokens. 0 drafts means: read only.
    `sampling` and `prompt_tokens`, the length of the prompt, are set when `first_position` is 0 and start the sequence
    afresh; what is read beyond the prompt, in that message or later, is output.
    """

    sequence_id: int
    epoch: int
    first_position: int
    committed: TokenIds
    draft_tokens: int
    sampling: SamplingParams | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProposeRequest:
    """One cohort's drafting work."""

    items: tuple[ProposeItem, ...]


@dataclass(frozen=True, slots=True)
class ProposedItem:
    """The drafter's answer for one sequence. `lost` means: unknown here, start again from position 0."""

    sequence_id: int
    epoch: int
    proposal: Proposal = NO_PROPOSAL
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ProposeResponse:
    """Answers in the order of the request, and how long the drafter computed."""

    items: tuple[ProposedItem, ...]
    compute_ms: float


# --- router <-> target --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """Tokens the target has not read yet, and the proposal to verify after them.

    The target forgets its KV entries from `first_position` on, reads `committed`, verifies `proposal`, and keeps the
    KV of what it accepted. With `sample` False (all but the last chunk of a prompt) it only reads.
    `sampling` and `prompt_tokens`, the length of the prompt, are set when `first_position` is 0 and start the sequence
    afresh; what is read beyond the prompt, in that message or later, is output.
    """

    sequence_id: int
    epoch: int
    first_position: int
    committed: TokenIds
    proposal: Proposal = NO_PROPOSAL
    sample: bool = True
    sampling: SamplingParams | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One step of the target: a cohort's verifications and prompt chunks."""

    items: tuple[VerifyItem, ...]


@dataclass(frozen=True, slots=True)
class VerifiedItem:
    """The target's answer for one sequence.

    `token_ids`: the accepted drafts followed by the correction or bonus token, so `accepted` + 1 ids; empty for a
    prompt chunk. `lost`: unknown here, start again from position 0. `fault`: this sequence cannot go on, and why.
    """

    sequence_id: int
    epoch: int
    accepted: int = 0
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    lost: bool = False
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyResponse:
    """Answers in the order of the request, and how long the target computed."""

    items: tuple[VerifiedItem, ...]
    compute_ms: float


# --- router <-> either worker -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Forget these sequences and free their KV blocks; None means every sequence."""

    sequence_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Ask a worker how full it is."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """KV accounting of one worker."""

    sequences: int
    free_blocks: int
    total_blocks: int


class WorkerRole(StrEnum):
    """What a worker does."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class WorkerRegistration:
    """What the router must know of a worker. `name` is the drafter's or the served model's name."""

    worker_id: str
    role: WorkerRole
    name: str
    process_ids: tuple[int, ...]
    vocabulary_size: int
    context_length: int
    block_tokens: int
    total_blocks: int


# --- what the router tells of itself ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One registered worker as the router sees it."""

    registration: WorkerRegistration
    stats: WorkerStats | None


@dataclass(frozen=True, slots=True)
class RoundTotals:
    """Sums over all rounds since the router started; times in milliseconds.

    `draft_wait_ms` and `verify_wait_ms` are what the router waited for answers, `draft_compute_ms` and
    `verify_compute_ms` what the workers computed meanwhile; `wall_ms` is whole rounds.
    """

    rounds: int = 0
    wall_ms: float = 0.0
    draft_wait_ms: float = 0.0
    draft_compute_ms: float = 0.0
    verify_wait_ms: float = 0.0
    verify_compute_ms: float = 0.0
    verifications: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """A snapshot of the router; `running` and `waiting` count sequences."""

    running: int
    waiting: int
    workers: tuple[WorkerReport, ...]
    totals: RoundTotals = RoundTotals()

    @property
    def can_answer(self) -> bool:
        """Whether at least one target is registered."""
        return any(worker.registration.role is WorkerRole.TARGET for worker in self.workers)


WorkerRequest: TypeAlias = ProposeRequest | VerifyRequest | ReleaseRequest | StatsRequest
WorkerResponse: TypeAlias = ProposeResponse | VerifyResponse | WorkerStats
