"""What a drafter expects behind the tokens of a sequence, how it turned out, and what may come of a verification."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.drafters.calibration import Calibration
from workers.messages import TokenIds, Verification

# How often a correction is among the runners-up, to begin with; as if it had been seen in this many corrections.
_LISTED_PRIOR, _LISTED_WEIGHT = 0.6, 10.0
_LISTED_MEMORY = 500.0


@dataclass(frozen=True, slots=True)
class Guess:
    """A token drawn for one position, and how sure that looked.

    `evidence` is the margin of a coupled draw, in units of logits, or the probability of a draw from a sparse q.
    `runners_up` are tokens, the nearest first, and their `gaps`; see `workers.decoding.runners_up.Draws`.
    """

    token: int
    evidence: float
    runners_up: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(slots=True)
class Forecast:
    """`guesses[i]` stands behind the first `base` tokens of a sequence and i of `drafts`; there may be fewer."""

    base: int
    verification: Verification
    drafts: list[int] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)

    def came_true(self, first_position: int, tokens: TokenIds) -> Iterator[tuple[Guess, int]]:
        """Yield the guesses that were put to the test, and the token that came.

        `tokens` int32 [n] stand from `first_position` on; what was drafted for positions before it was accepted.
        """
        end = first_position + len(tokens)
        for index, guess in enumerate(self.guesses):
            position = self.base + index
            if position >= end:
                return
            if position < first_position and index >= len(self.drafts):
                return
            came = self.drafts[index] if position < first_position else int(tokens[position - first_position])
            yield guess, came
            if index >= len(self.drafts) or came != self.drafts[index]:
                return


@dataclass(frozen=True, slots=True)
class Outcome:
    """`accepted` drafts are accepted and followed by `token`, with this probability."""

    accepted: int
    token: int
    probability: float


class Experience:
    """What a drafter has learnt about its own guesses."""

    def __init__(self) -> None:
        self._calibrations = {
            Verification.COUPLED: Calibration.of_margins(),
            Verification.RATIO: Calibration.of_probabilities(),
        }
        self._corrections = _LISTED_WEIGHT
        self._listed = _LISTED_WEIGHT * _LISTED_PRIOR

    def confidence(self, verification: Verification, guess: Guess) -> float:
        """Return the probability that the guess is right, if all before it is."""
        return self._calibrations[verification].probability(guess.evidence)

    def learn(self, forecast: Forecast, first_position: int, tokens: TokenIds) -> None:
        """Learn from what came; see `Forecast.came_true`."""
        calibration = self._calibrations[forecast.verification]
        for guess, came in forecast.came_true(first_position, tokens):
            calibration.learn(guess.evidence, came == guess.token)
            if came != guess.token and guess.runners_up:
                kept = min(1.0, _LISTED_MEMORY / (self._corrections + 1))
                self._corrections = (self._corrections + 1) * kept
                self._listed = (self._listed + (came in guess.runners_up)) * kept

    def likeliest_outcomes(self, forecast: Forecast, most: int) -> list[Outcome]:
        """Return at most `most` outcomes of verifying the forecast's drafts, likeliest first.

        An outcome (a, t) has the probability that the first a drafts come, each if those before it do, and then t.
        """
        outcomes: list[Outcome] = []
        reached = 1.0
        for accepted, guess in enumerate(forecast.guesses):
            expected = self._expected(forecast.verification, guess)
            draft = forecast.drafts[accepted] if accepted < len(forecast.drafts) else None
            outcomes += [Outcome(accepted, t, reached * p) for t, p in expected.items() if t != draft]
            if draft is None:
                break
            # A draft that somebody else made, and that is nowhere near, is not likely.
            reached *= expected.get(draft, 0.1 * (1 - sum(expected.values())))
        return heapq.nlargest(most, outcomes, key=lambda outcome: outcome.probability)

    def _expected(self, verification: Verification, guess: Guess) -> dict[int, float]:
        """Return the probability of the guess and of each runner-up: the nearer, the likelier."""
        confidence = self.confidence(verification, guess)
        weights = [math.exp(guess.gaps[0] - gap) for gap in guess.gaps]
        listed = (1 - confidence) * self._listed / self._corrections
        shares = (listed * weight / sum(weights) for weight in weights)
        return {guess.token: confidence} | dict(zip(guess.runners_up, shares, strict=True))
