"""How often a drafter is right, given how sure it looked: learnt online from what became of its drafts."""

import bisect
import itertools
import math
from collections.abc import Sequence

# A bin forgets: what it has seen counts like this many outcomes at most.
_MEMORY = 500.0
# And it starts as if it had seen this many that the prior describes.
_PRIOR_WEIGHT = 4.0
_LEAST, _MOST = 0.005, 0.995

# Bins of margins, in units of logits, and of probabilities; each value stands between two edges.
_MARGIN_EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.4, 1.8, 2.3, 3.0, 3.8, 4.8, 6.0, 8.0, 11.0, 15.0, 20.0)
_PROBABILITY_EDGES = tuple(index / 16 for index in range(17))


class Calibration:
    """P(accepted | evidence), rising with the evidence: a histogram, made monotone by pooling neighbours.

    Isotonic regression (Barlow et al. 1972, "Statistical inference under order restrictions") of 16 bins, each with a
    prior. Between the middles of bins it is interpolated. Bounded to 0.005 … 0.995 whatever comes.
    """

    def __init__(self, edges: Sequence[float], prior: Sequence[float]) -> None:
        """Begin with the probability `prior[i]` for evidence from `edges[i]` to `edges[i + 1]`."""
        self._edges = list(edges[1:-1])
        self._middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        self._trials = [_PRIOR_WEIGHT] * len(self._middles)
        self._hits = [_PRIOR_WEIGHT * probability for probability in prior]
        self._curve: list[float] | None = None

    @classmethod
    def of_margins(cls) -> "Calibration":
        """Return one for margins: what the logit of the first runner-up lacked."""
        return cls(_MARGIN_EDGES, [1 - 0.55 * math.exp(-(a + b) / 4) for a, b in itertools.pairwise(_MARGIN_EDGES)])

    @classmethod
    def of_probabilities(cls) -> "Calibration":
        """Return one for the probability that the drafter itself gave to its draft."""
        return cls(_PROBABILITY_EDGES, [0.3 + 0.65 * (a + b) / 2 for a, b in itertools.pairwise(_PROBABILITY_EDGES)])

    def learn(self, evidence: float, accepted: bool) -> None:
        """Count one outcome."""
        index = bisect.bisect_right(self._edges, evidence)
        kept = min(1.0, _MEMORY / (self._trials[index] + 1))
        self._trials[index] = (self._trials[index] + 1) * kept
        self._hits[index] = (self._hits[index] + accepted) * kept
        self._curve = None

    def probability(self, evidence: float) -> float:
        """Return the estimate for `evidence`; anything beyond the edges counts as the last bin."""
        if self._curve is None:
            self._curve = _rising(self._hits, self._trials)
        middles = self._middles
        right = bisect.bisect_left(middles, evidence)
        if right == 0 or right == len(middles):
            value = self._curve[min(right, len(middles) - 1)]
        else:
            share = (evidence - middles[right - 1]) / (middles[right] - middles[right - 1])
            value = self._curve[right - 1] + share * (self._curve[right] - self._curve[right - 1])
        return min(max(value, _LEAST), _MOST)


def _rising(hits: Sequence[float], trials: Sequence[float]) -> list[float]:
    """Return hits / trials with neighbours pooled, as far as that takes, until no value is less than the one before."""
    pools: list[tuple[float, float, int]] = []
    for hit, trial in zip(hits, trials, strict=True):
        pools.append((hit, trial, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            last, before = pools.pop(), pools.pop()
            pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    return [hit / trial for hit, trial, bins in pools for _ in range(bins)]
