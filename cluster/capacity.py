"""What a deployment should bring: step times, expected speed-up, drafters per target, tokens per second.

Acceptance a is the share of drafts accepted where all before them were, c a draft step's time over a verification's.
Step times that nobody measured come from the roofline model (Williams, Waterman and Patterson 2009).
"""

from dataclasses import dataclass
from math import ceil

from cluster.accelerators import Accelerator
from cluster.model_shapes import ModelShape

BANDWIDTH_SHARE = 0.65
"""Share of the peak bandwidth that decoding attains. gpt-fast's README has 0.69 for Llama-2-7B on one A100-80GB and
0.66 for 70B over four; unmeasured here, and less where launching kernels takes longer than they do (small models)."""
COMPUTE_SHARE = 0.5
"""Share of the peak arithmetic that a wide step attains; unmeasured here."""
LIKELY_HIT = 0.9
"""Share of verifications whose outcome a drafter had drafted behind, where nobody measured it: Saguaro's figure."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of n tokens in b sequences takes max(base_ms + n token_ms + b sequence_ms, n compute_ms).

    A measured line has no `compute_ms`; the roofline has no `token_ms`.
    """

    base_ms: float
    token_ms: float = 0.0
    sequence_ms: float = 0.0
    compute_ms: float = 0.0
    origin: str = "given"

    def ms(self, tokens: int, sequences: int) -> float:
        """Return the time of a step."""
        moved = self.base_ms + tokens * self.token_ms + sequences * self.sequence_ms
        return max(moved, tokens * self.compute_ms)


def roofline_step(
    shape: ModelShape, device: Accelerator, dtype: str, quantization: str, ranks: int, context_tokens: int
) -> StepTime:
    """Return the time in which weights and the KV of `context_tokens` per sequence are read, or multiplied if longer.

    Messages between ranks count as part of the share of bandwidth that is not attained.
    """
    bandwidth = device.bandwidth * BANDWIDTH_SHARE
    read = shape.weight_bytes(dtype, quantization, ranks).read
    cached = context_tokens * shape.kv_token_bytes(dtype, ranks)
    # Quantised weights are multiplied in the dtype of the activations.
    slower = 2.0 if dtype == "float32" else 1.0
    return StepTime(
        base_ms=1e3 * read / bandwidth,
        sequence_ms=1e3 * cached / bandwidth,
        compute_ms=1e3 * slower * shape.token_flops(ranks) / (device.flops * COMPUTE_SHARE),
        origin="roofline",
    )


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Return E(k) = 1 + a + … + a^k, the tokens that one verification commits (Leviathan et al. 2023, equation 1)."""
    return sum(acceptance**place for place in range(draft_tokens + 1))


def speed_up(acceptance: float, draft_tokens: int, draft_ms: float, verify_ms: float, plain_ms: float) -> float:
    """Return the speed over plain decoding when each round drafts, then verifies.

    With `verify_ms` equal to `plain_ms` that is (1 − a^(k+1)) / ((1 − a)(k c + 1)).

    Args:
        acceptance: a, 0 to 1.
        draft_tokens: k.
        draft_ms: One draft step.
        verify_ms: A step that verifies k drafts.
        plain_ms: A step of the target without drafts.
    """
    round_ms = draft_tokens * draft_ms + verify_ms
    return expected_tokens(acceptance, draft_tokens) * plain_ms / round_ms


def ahead_speed_up(
    acceptance: float, draft_tokens: int, draft_ms: float, verify_ms: float, plain_ms: float, hit: float
) -> float:
    """Return it when the drafter goes on while the target verifies, and with chance `hit` it guessed the outcome.

    E / (h max(1, k c) + (1 − h)(1 + k c)), in the times above.
    """
    drafting_ms = draft_tokens * draft_ms
    round_ms = hit * max(verify_ms, drafting_ms) + (1 - hit) * (verify_ms + drafting_ms)
    return expected_tokens(acceptance, draft_tokens) * plain_ms / round_ms


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Step times of a target and of one of its drafters."""

    target: StepTime
    drafter: StepTime

    def plain_ms(self, sequences: int) -> float:
        """A step of the target with a token of each sequence."""
        return self.target.ms(sequences, sequences)

    def verify_ms(self, sequences: int, draft_tokens: int) -> float:
        """A step of the target with that many drafts of each sequence."""
        return self.target.ms(sequences * (draft_tokens + 1), sequences)

    def draft_ms(self, sequences: int) -> float:
        """One draft step."""
        return self.drafter.ms(sequences, sequences)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the best draft length brings over plain decoding, and the time of one round."""

    draft_tokens: int
    speed_up: float
    round_ms: float


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """What one target brings with `sequences` in a round: drafting in turn with verification, and ahead of it.

    `drafters` is how many each target keeps busy when drafting ahead; 0 where no draft pays. `break_even` is the
    acceptance from which drafting in turn pays; None if it never does.
    """

    sequences: int
    plain_ms: float
    draft_ms: float
    in_turn: Expectation
    ahead: Expectation
    drafters: float
    break_even: float | None

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens of one target without drafts."""
        return 1e3 * self.sequences / self.plain_ms

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one target when drafting ahead."""
        return self.plain_tokens_per_s * self.ahead.speed_up


def capacity_row(
    times: PairTimes, acceptance: float, sequences: int, max_draft_tokens: int, hit: float = LIKELY_HIT
) -> CapacityRow:
    """Return what rounds of `sequences` bring with the best draft lengths from 0 to `max_draft_tokens`.

    A drafter is busy for k steps of each round, so a target keeps k draft_ms / round_ms of them busy. More than one
    need as many more cohorts, each drafted by another.
    """
    in_turn = _best(times, acceptance, sequences, max_draft_tokens, 0.0)
    ahead = _best(times, acceptance, sequences, max_draft_tokens, hit)
    draft_ms = times.draft_ms(sequences)
    return CapacityRow(
        sequences=sequences,
        plain_ms=times.plain_ms(sequences),
        draft_ms=draft_ms,
        in_turn=in_turn,
        ahead=ahead,
        drafters=ahead.draft_tokens * draft_ms / ahead.round_ms,
        break_even=break_even(times, sequences, max_draft_tokens),
    )


def _best(times: PairTimes, acceptance: float, sequences: int, max_draft_tokens: int, hit: float) -> Expectation:
    plain, draft = times.plain_ms(sequences), times.draft_ms(sequences)

    def expect(count: int) -> Expectation:
        gain = ahead_speed_up(acceptance, count, draft, times.verify_ms(sequences, count), plain, hit)
        return Expectation(count, gain, expected_tokens(acceptance, count) * plain / gain)

    return max(map(expect, range(max_draft_tokens + 1)), key=lambda each: each.speed_up)


def break_even(times: PairTimes, sequences: int, max_draft_tokens: int) -> float | None:
    """Return the acceptance from which some draft length is faster than none; None where none ever is.

    Drafting ahead is left out: it needs less.
    """
    plain, draft = times.plain_ms(sequences), times.draft_ms(sequences)

    def pays(acceptance: float) -> bool:
        return any(
            speed_up(acceptance, count, draft, times.verify_ms(sequences, count), plain) > 1
            for count in range(1, max_draft_tokens + 1)
        )

    low, high = 0.0, 1.0
    if not pays(high):
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def drafters_for(rows: list[CapacityRow], targets: int) -> int:
    """Return how many drafters keep up with `targets` targets at the busiest of `rows`."""
    return ceil(targets * max((row.drafters for row in rows), default=0.0))
