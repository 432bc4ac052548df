"""Where a request's time goes: phases add up, and the first commit is no decoding."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.telemetry.timeline import Phase, Timeline


def test_reading_ends_with_the_first_commit_and_decoding_is_what_comes_behind_it() -> None:
    line = Timeline(began_s=10.0)
    line.enter(Phase.PREFILL, 10.5)
    assert line.committed(12.0)
    assert not line.committed(12.25)
    line.end(13.0)
    spent = [line.spent_ms(phase) for phase in Phase]
    assert spent == pytest.approx([500.0, 1500.0, 1000.0])
    assert (line.total_ms, line.first_token_ms) == pytest.approx((3000.0, 2000.0))


def test_a_request_that_is_read_again_elsewhere_has_its_first_token_once() -> None:
    line = Timeline(began_s=0.0)
    line.enter(Phase.PREFILL, 1.0)
    assert line.committed(2.0)
    line.enter(Phase.QUEUE, 3.0)
    line.enter(Phase.PREFILL, 5.0)
    assert not line.committed(6.0)
    line.end(7.0)
    assert [line.spent_ms(phase) for phase in Phase] == pytest.approx([3000.0, 2000.0, 2000.0])
    assert line.first_token_ms == pytest.approx(2000.0)


def test_a_request_that_never_ran_has_only_waited() -> None:
    line = Timeline(began_s=1.0)
    line.end(4.0)
    assert [line.spent_ms(phase) for phase in Phase] == pytest.approx([3000.0, 0.0, 0.0])
    assert line.first_token_ms is None


def test_a_process_that_is_stopped_while_it_reads_its_clocks_tells_the_same_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, stops = 5.0, iter([3.0, 0.5])

    def time_ns() -> int:
        nonlocal now_s
        now_s += next(stops, 0.0)
        return round(now_s * 1e9)

    with monkeypatch.context() as clocks:
        clocks.setattr(time, "perf_counter", lambda: now_s)
        clocks.setattr(time, "time_ns", time_ns)
        line = Timeline()
    assert now_s == 8.5
    assert (line.began_s, line.began_ns, line.epoch_ns(now_s)) == (5.0, 5 * 10**9, 8_500_000_000)


@given(st.lists(st.tuples(st.sampled_from([*Phase, None]), st.floats(0, 100)), max_size=20))
def test_phases_add_up_whatever_happens_and_none_is_negative(steps: list[tuple[Phase | None, float]]) -> None:
    line, now = Timeline(began_s=5.0), 5.0
    for phase, seconds in steps:
        now += seconds
        if phase is None:
            line.committed(now)
        else:
            line.enter(phase, now)
    line.end(now)
    spent = [line.spent_ms(phase) for phase in Phase]
    assert all(value >= 0 and math.isfinite(value) for value in spent)
    assert sum(spent) == pytest.approx(line.total_ms) == pytest.approx((now - 5.0) * 1e3)
    assert line.epoch_ns(now) >= line.began_ns
