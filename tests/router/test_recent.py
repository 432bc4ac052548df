"""Values that are remembered, and for how long."""

import time

import pytest

from workers.router.recent import MAX_AGE_S, Recent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands until it is changed."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_it_is_the_median_of_the_last_values(clock: list[float]) -> None:
    recent = Recent(3)
    assert (len(recent), recent.median) == (0, 0.0)
    medians = []
    for value in (5.0, 7.0, 900.0, 6.0, 8.0):
        recent.observe(value)
        medians.append(recent.median)
    assert medians == [5.0, 6.0, 7.0, 7.0, 8.0]
    assert len(recent) == 3


def test_after_a_long_silence_the_first_new_value_changes_nothing_and_the_third_decides(clock: list[float]) -> None:
    recent = Recent(15)
    for _ in range(15):
        recent.observe(10.0)
    clock[0] += MAX_AGE_S + 1
    recent.observe(80.0)
    assert (len(recent), recent.median) == (3, 10.0)  # two old ones are left, to judge the first new one by
    recent.observe(82.0)
    assert recent.median == 45.0
    recent.observe(84.0)
    assert recent.median == 80.0
