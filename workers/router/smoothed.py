"""Averages that follow what they observe."""

from dataclasses import dataclass

SMOOTHING = 0.1


@dataclass(slots=True)
class Smoothed:
    """An exponential average that begins with its first value. `smoothing` is the weight of the latest one."""

    value: float = 0.0
    count: int = 0
    smoothing: float = SMOOTHING

    def observe(self, value: float) -> None:
        """Take another value in."""
        self.count += 1
        self.value += (value - self.value) * max(self.smoothing, 1 / self.count)
