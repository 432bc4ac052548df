"""How much a drafter can draft ahead while a verification runs, and whether that pays. Pure."""

from dataclasses import dataclass, field

from workers.router.smoothed import Smoothed
from workers.router.step_times import StepTimeFit

MOST_BRANCHES = 8
"""Per sequence: more outcomes hardly ever come to pass."""
TOLERANCE = 1.15
"""By so much longer than the verification drafting ahead may take: a hit then still saves nearly all of it."""
SHARED_SLOWDOWN = 1.15
"""By so much a drafter slows down a target that it shares a device with, at least."""
LEAST_STEPS = 4
"""So many verifications beside drafting ahead are seen before it is judged."""
SLOWDOWN_SMOOTHING = 0.3
"""Each of these rounds is a slow one where devices are shared: few of them must do."""
REST_EVERY, TRY_EVERY = 24, 64
"""Where it pays, one round in so many does without it, so that it can be compared; where not, one tries it."""


@dataclass(frozen=True, slots=True)
class AheadBudget:
    """Outcomes to draft for of each sequence, drafts behind each of them, and steps of the drafter in all."""

    branches: int
    draft_tokens: int
    steps: int


def ahead_budget(
    sequences: int, draft_tokens: int, rate: float, verify_ms: float, draft: StepTimeFit
) -> AheadBudget | None:
    """Return what fits into the verification; None if that is not even one draft behind all that are verified.

    Behind corrections k drafts take k steps. Behind all drafts they take k + 1, as the drafter first reads the last of
    these: a step that brings one draft of one outcome, worth its time where acceptance is high. Steps come before
    branches: a hit on few drafts would make the next round a short one.

    Args:
        sequences: How many are drafted for.
        draft_tokens: The most drafts behind one outcome.
        rate: Their acceptance rate, in [0, 1].
        verify_ms: The time of the verification.
        draft: The time of one draft step by its rows.
    """
    available_ms = verify_ms * TOLERANCE
    for steps in range(draft_tokens + 1, 1, -1):
        for branches in range(MOST_BRANCHES, 0, -1):
            step_ms = draft.time_ms(sequences * branches)
            if steps * step_ms > available_ms:
                continue
            if 2 < steps == draft_tokens + 1 and not _last_step_pays(draft_tokens, rate, verify_ms, step_ms):
                break
            return AheadBudget(branches, draft_tokens, steps)
    return None


def _last_step_pays(draft_tokens: int, rate: float, verify_ms: float, step_ms: float) -> bool:
    """Whether the k-th draft behind all drafts is worth what the next round then waits for it.

    It becomes a token if k drafts are accepted, what is expected behind them comes, and k drafts again are accepted.
    Time is worth the E(k) tokens that come with a verification; see `workers.router.goodput`.
    """
    steps = draft_tokens + 1
    longer_ms = max(0.0, steps * step_ms - max(verify_ms, draft_tokens * step_ms))
    tokens = sum(rate**depth for depth in range(steps))
    return rate ** (2 * draft_tokens + 1) * verify_ms > tokens * longer_ms or longer_ms == 0


@dataclass(slots=True)
class AheadJudge:
    """Decides round by round whether to draft ahead.

    Devices of their own do not feel each other. But a drafter that shares cores or memory bandwidth with its target
    slows the verification down, and then drafting ahead may cost more than the draft time it takes off a round.
    `slowdown` is the time of a verification beside it, divided by what that would take alone; `saved_ms` how much
    shorter the next round waited for its drafts than if it had asked for them, misses and waits for drafts that were
    not ready included; `is_on` the last verdict.
    """

    slowdown: Smoothed = field(default_factory=lambda: Smoothed(smoothing=SLOWDOWN_SMOOTHING))
    saved_ms: Smoothed = field(default_factory=Smoothed)
    is_on: bool = True
    _rounds: int = 0

    def wants(self, verify_ms: float) -> bool:
        """Tell whether to draft ahead in this round, given the time that its verification takes alone."""
        self._rounds += 1
        self.is_on = self.pays(verify_ms)
        if self.is_on:
            return self._rounds % REST_EVERY != 0
        return self._rounds % TRY_EVERY == 0

    @property
    def devices_are_shared(self) -> bool:
        """Whether the target feels it when its drafter works."""
        return self.knows_slowdown and self.slowdown.value > SHARED_SLOWDOWN

    @property
    def knows_slowdown(self) -> bool:
        """Whether enough verifications beside drafting were seen."""
        return self.slowdown.count >= LEAST_STEPS

    def pays(self, verify_ms: float) -> bool:
        """Tell whether it saves more than the slower verification costs; yes as long as too little was seen."""
        if not self.knows_slowdown or self.saved_ms.count < LEAST_STEPS:
            return True
        return self.saved_ms.value > (self.slowdown.value - 1) * verify_ms

    def hidden_ms(self, verify_ms: float) -> float:
        """Return how much of the draft time it takes off a round in the end, at least 0."""
        slower_ms = max(0.0, self.slowdown.value - 1) * verify_ms
        return max(0.0, self.saved_ms.value - slower_ms) if self.is_on else 0.0
