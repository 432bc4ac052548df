"""Between router and workers: the steps of a round, and what else a worker answers to."""

from dataclasses import dataclass, field
from typing import TypeAlias

from workers.messages.arrays import NO_TOKENS, Float32s, TokenIds
from workers.messages.generation import SamplingParams, TokenLogprobs, Verification

# --- router <-> drafter -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SparseProbabilities:
    """The distributions that k drafts were drawn from: `token_ids` int32 and `probabilities` float32 [k, m].

    Each row sums to 1 over its tokens; a row that has fewer than m is filled with probability 0.
    """

    token_ids: TokenIds
    probabilities: Float32s


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence: `token_ids` int32 [k].

    Without `parents` they are a chain for positions L to L + k - 1. `parents` int32 [k] makes them a tree: the index
    of each node's parent, which comes before it, or -1 for children of the last committed token; siblings differ.

    `q` is set where the drafts, a chain, are to be verified by ratio: each was drawn from its row.

    `confidence` float32 [k] is the drafter's estimate, for each draft of a chain, that it is accepted if those before
    it are; None where the drafter makes none.
    """

    token_ids: TokenIds
    parents: TokenIds | None = None
    q: SparseProbabilities | None = None
    confidence: Float32s | None = None

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

    `prompt` int32 may come with them: all that is known of the sequence, `committed` being its beginning. The worker
    may then use what it has cached of other sequences with the same beginning and the same `cache_salt`, up to the last
    token but one, instead of reading it. None asks it to read everything.

    With RATIO the drafts come from the drafter's own sparse q, which the proposal carries; with COUPLED from the noise
    that the target draws with.

    A chain ends early, but not before its first draft, where the drafter estimates the probability that all of it is
    accepted at less than `least_confidence`; see `Proposal.confidence`.

    `trace_parent` is the W3C traceparent below which the worker puts its span of the step; None for all that are not
    sampled.
    """

    sequence_id: int
    epoch: int
    first_position: int
    committed: TokenIds
    draft_tokens: int
    sampling: SamplingParams | None = None
    prompt_tokens: int = 0
    verification: Verification = Verification.COUPLED
    prompt: TokenIds | None = None
    cache_salt: str | None = None
    least_confidence: float = 0.0
    trace_parent: str | None = None


@dataclass(frozen=True, slots=True)
class ProposeRequest:
    """One cohort's drafting work."""

    items: tuple[ProposeItem, ...]


@dataclass(frozen=True, slots=True)
class ProposedItem:
    """The drafter's answer for one sequence. `lost` means: unknown here, start again from position 0.

    `cached_tokens` is set where the drafter holds more of the sequence than it was sent; see `ProposeItem.prompt`.
    """

    sequence_id: int
    epoch: int
    proposal: Proposal = NO_PROPOSAL
    lost: bool = False
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ProposeResponse:
    """Answers in the order of the request, and how long the drafter computed."""

    items: tuple[ProposedItem, ...]
    compute_ms: float


# --- router <-> drafter, while the target verifies ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftAheadItem:
    """A sequence whose chain is being verified, and how far to draft beyond what may come of that.

    `first_position` and `committed` are as in `ProposeItem`; behind them the target verifies `drafts`, whoever proposed
    them. The drafter takes the likeliest outcomes, `branches` of them at most, and drafts `draft_tokens` behind each,
    or what `steps` steps of its model allow, the one that reads the drafts included. `trace_parent` is as in
    `ProposeItem`.
    """

    sequence_id: int
    epoch: int
    first_position: int
    committed: TokenIds
    drafts: TokenIds
    draft_tokens: int
    branches: int
    steps: int | None = None
    trace_parent: str | None = None


@dataclass(frozen=True, slots=True)
class DraftAheadRequest:
    """One cohort's drafting ahead. Sequences that the drafter does not know are answered with `lost`."""

    items: tuple[DraftAheadItem, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """If `accepted` of the drafts are accepted and followed by `token_id`, `proposal` is what to verify next.

    `probability` is the drafter's estimate that it comes so.
    """

    accepted: int
    token_id: int
    proposal: Proposal
    probability: float


@dataclass(frozen=True, slots=True)
class DraftedAheadItem:
    """The branches of one sequence, likeliest first. The drafter has read commits and drafts, unless it is `lost`."""

    sequence_id: int
    epoch: int
    branches: tuple[Branch, ...] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True)
class DraftAheadResponse:
    """Answers in the order of the request, and how long the drafter computed."""

    items: tuple[DraftedAheadItem, ...]
    compute_ms: float


# --- router <-> target --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """Tokens the target has not read yet, and the proposal to verify after them.

    The target forgets its KV entries from `first_position` on, reads `committed`, verifies `proposal`, and keeps the
    KV of what it accepted. With `sample` False (all but the last chunk of a prompt) it only reads.
    `sampling` and `prompt_tokens`, the length of the prompt, are set when `first_position` is 0 and start the sequence
    afresh; what is read beyond the prompt, in that message or later, is output. `prompt` and `cache_salt` may come with
    them, as in `ProposeItem`.

    `logprobs` is the request's: that many of the likeliest tokens are reported with each token drawn, None for no
    report at all. `scored` int32 [s] is reported likewise: tokens of the prompt of which the i-th stands behind the
    i-th of `committed`.

    Where the proposal is empty, the target looks up to `lookup_tokens` drafts up in what it has of the sequence itself.
    `trace_parent` is as in `ProposeItem`.
    """

    sequence_id: int
    epoch: int
    first_position: int
    committed: TokenIds
    proposal: Proposal = NO_PROPOSAL
    sample: bool = True
    sampling: SamplingParams | None = None
    prompt_tokens: int = 0
    logprobs: int | None = None
    scored: TokenIds = field(default_factory=lambda: NO_TOKENS)
    prompt: TokenIds | None = None
    cache_salt: str | None = None
    lookup_tokens: int = 0
    trace_parent: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One step of the target: a cohort's verifications and prompt chunks."""

    items: tuple[VerifyItem, ...]


@dataclass(frozen=True, slots=True)
class VerifiedItem:
    """The target's answer for one sequence.

    `token_ids`: the accepted drafts followed by the correction or bonus token, so `accepted` + 1 ids; empty for a
    prompt chunk. `lost`: unknown here, start again from position 0. `fault`: this sequence cannot go on, and why.
    `logprobs` and `scored` are the reports that the item asked for, of `token_ids` and of the item's `scored`.
    `cached_tokens` is set where the target holds more of the sequence than it was sent; see `ProposeItem.prompt`.
    `looked_up` counts the drafts that the target proposed itself; see `VerifyItem.lookup_tokens`.
    `reused_tokens`: where the item started the sequence, how many of its tokens the target had cached already.
    """

    sequence_id: int
    epoch: int
    accepted: int = 0
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    lost: bool = False
    fault: str | None = None
    logprobs: TokenLogprobs | None = None
    scored: TokenLogprobs | None = None
    cached_tokens: int | None = None
    looked_up: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class VerifyResponse:
    """Answers in the order of the request, how long the target computed, and for how many tokens.

    `read_tokens` counts commits and drafts, but not what was cached of other sequences.
    """

    items: tuple[VerifiedItem, ...]
    compute_ms: float
    read_tokens: int


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
    """KV accounting of one worker.

    `cached_blocks` hold prefixes that may be shared; those of them that no sequence holds count as free, too. Since it
    was loaded the worker has looked up `prefix_cache_queries` tokens in them and found `prefix_cache_hits`.
    """

    sequences: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


WorkerRequest: TypeAlias = ProposeRequest | DraftAheadRequest | VerifyRequest | ReleaseRequest | StatsRequest
WorkerResponse: TypeAlias = ProposeResponse | DraftAheadResponse | VerifyResponse | WorkerStats
