"""Step times of targets and drafters, and what they make of a batch: the draft length that pays best, and its round."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """One round of every sequence of a target: `tokens` committed per sequence, in `cycle_ms`.

    Of it the target waits for drafts for `exposed_ms`, and one drafter computes for `draft_ms`.
    """

    draft_tokens: int
    tokens: float
    cycle_ms: float
    exposed_ms: float = 0.0
    draft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Devices:
    """A target (by default like 70B over four A100s) and a drafter (like 1B on an L4), and how long they take to start.

    A target holds `kv_tokens` tokens of `max_batch` sequences at most; a drafter drafts for `max_rows` at a time.
    """

    target_base_ms: float = 30.0
    target_token_ms: float = 0.1
    draft_step_ms: float = 4.0
    draft_row_ms: float = 0.05
    kv_tokens: int = 40_000
    max_batch: int = 64
    max_draft_tokens: int = 8
    gpus_per_target: int = 4
    gpus_per_drafter: int = 1
    target_start_s: float = 150.0
    drafter_start_s: float = 60.0
    ingress_start_s: float = 15.0

    def best_round(self, batch: int, acceptance: float, drafters_per_target: float) -> Round:
        """Return the round that commits most tokens per millisecond, over all draft lengths; without drafts k is 0."""
        longest = self.max_draft_tokens if drafters_per_target > 0 else 0
        rounds = [self._round(batch, acceptance, drafters_per_target, k) for k in range(longest + 1)]
        return max(rounds, key=lambda each: each.tokens / each.cycle_ms)

    def _round(self, batch: int, acceptance: float, drafters_per_target: float, k: int) -> Round:
        """One cohort, or two of which one is drafted for while the other is verified: whichever is faster.

        The expected tokens are those of a chain (Leviathan et al. 2023, equation 1).
        """
        tokens = sum(acceptance**place for place in range(k + 1))
        if k == 0:
            return Round(0, 1.0, self._verify_ms(batch))
        whole, half = self._verify_ms(batch * (k + 1)), self._verify_ms(batch * (k + 1) / 2)
        draft_ms, half_ms = (self._draft_ms(rows, k, drafters_per_target) for rows in (batch, batch / 2))
        one = Round(k, tokens, whole + draft_ms, draft_ms, draft_ms)
        two_ms = max(2 * half, half + half_ms)
        two = Round(k, tokens, two_ms, two_ms - 2 * half, 2 * half_ms)
        return two if batch > 1 and two.cycle_ms < one.cycle_ms else one

    def _verify_ms(self, tokens: float) -> float:
        return self.target_base_ms + self.target_token_ms * tokens

    def _draft_ms(self, rows: float, k: int, drafters_per_target: float) -> float:
        """Several drafters share a target's rows; one drafter of several targets serves them one after the other."""
        share = rows / max(1.0, drafters_per_target)
        return k * (self.draft_step_ms + self.draft_row_ms * share) * max(1.0, 1 / drafters_per_target)
