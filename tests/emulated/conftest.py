"""A clock for emulated devices that shows no real time."""

import pytest

from workers.emulated import stretched, timing


class StandingClock:
    """Takes the place of the module `time`: time passes only while somebody sleeps, and costs nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        """What the clock shows, seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """The clock of all emulated devices: computing takes none of their time, however long it really takes."""
    standing = StandingClock()
    for module in (timing, stretched):
        monkeypatch.setattr(module, "time", standing)
    return standing
