"""How long a worker's step of n tokens takes, learned from its steps: a robust line through their times."""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from statistics import median

from workers.router.recent import Recent

SAMPLES_PER_SIZE = 15
ANY_SIZE = sys.maxsize


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A step of n tokens takes about `base_ms` + n * `token_ms`; neither is negative."""

    base_ms: float
    token_ms: float

    def time_ms(self, tokens: int) -> float:
        """Return the predicted time of a step."""
        return self.base_ms + tokens * self.token_ms


def fit_line(points: Sequence[tuple[float, float]]) -> StepTimeFit | None:
    """Fit (tokens, ms) points; None if they are all of one size.

    The slope is the median of the slopes between all pairs of points, each weighted by how far its points are apart
    (Theil and Sen with the weights of Jaeckel 1972): a few wrong points do not move it far.
    """
    slopes = sorted(
        ((b[1] - a[1]) / (b[0] - a[0]), abs(b[0] - a[0])) for a, b in combinations(points, 2) if a[0] != b[0]
    )
    if not slopes:
        return None
    reached = accumulate(weight for _, weight in slopes)
    half = sum(weight for _, weight in slopes) / 2
    slope = max(0.0, next(slope for (slope, _), weight in zip(slopes, reached, strict=True) if weight >= half))
    return StepTimeFit(max(0.0, median(ms - slope * tokens for tokens, ms in points)), slope)


@dataclass(slots=True)
class StepTimes:
    """The last few steps of each size. Sizes are powers of two, so that many small steps do not displace the large.

    A step takes about as long as reading the weights, or as computing, whichever is longer: small steps lie on another
    line than those with prompts. Who asks says up to which size the line is to hold; the smallest two sizes are always
    in it. Fits are asked for many times between two steps and made once.
    """

    _sizes: dict[int, tuple[Recent, Recent]] = field(default_factory=dict)
    _fits: dict[int, StepTimeFit | None] = field(default_factory=dict)

    def observe(self, tokens: int, ms: float) -> None:
        """Note that a step of `tokens` tokens took `ms` milliseconds."""
        size = tokens.bit_length()
        if size not in self._sizes:
            self._sizes[size] = Recent(SAMPLES_PER_SIZE), Recent(SAMPLES_PER_SIZE)
        of_tokens, of_ms = self._sizes[size]
        of_tokens.observe(tokens)
        of_ms.observe(ms)
        self._fits.clear()

    def fit(self, up_to: int = ANY_SIZE) -> StepTimeFit | None:
        """Return the line through the median step of each size; None before two sizes were seen."""
        return self.fit_or_flat(up_to) if len(self._sizes) > 1 else None

    def fit_or_flat(self, up_to: int = ANY_SIZE) -> StepTimeFit | None:
        """Return the line, or a flat one through the only size that was seen; None before any was."""
        sizes = sorted(self._sizes)
        used = max(2, bisect_right(sizes, up_to.bit_length()))
        if used not in self._fits:
            points = [(tokens.median, ms.median) for tokens, ms in (self._sizes[size] for size in sizes[:used])]
            self._fits[used] = StepTimeFit(points[0][1], 0.0) if len(points) == 1 else fit_line(points)
        return self._fits[used]
