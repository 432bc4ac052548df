"""What was seen last, without what is out of date."""

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

MAX_AGE_S = 60.0
KEPT_OLD_VALUES = 2


@dataclass(slots=True)
class Recent:
    """The last few values, at most `most`; a single one that is far off moves their median little.

    Once another comes, those older than `MAX_AGE_S` seconds are forgotten but for the last `KEPT_OLD_VALUES`: after a
    long silence the first new value changes nothing, and the third outweighs the old ones.
    """

    most: int
    _values: deque[tuple[float, float]] = field(default_factory=deque)
    _median: float = 0.0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def median(self) -> float:
        """The median of what is remembered; 0 before anything was observed."""
        return self._median

    def observe(self, value: float) -> None:
        """Take another value in."""
        now_s = time.monotonic()
        while len(self._values) > KEPT_OLD_VALUES and self._values[KEPT_OLD_VALUES][0] < now_s - MAX_AGE_S:
            self._values.popleft()
        if len(self._values) == self.most:
            self._values.popleft()
        self._values.append((now_s, value))
        self._median = median(value for _, value in self._values)
