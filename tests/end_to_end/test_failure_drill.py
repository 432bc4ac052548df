"""A short failure drill on a real service: processes die and hang under a mixed load, and no answer is another."""

import asyncio
from pathlib import Path

from benchmarks.chaos import ServiceUnderTest, disturb, wait_until_whole
from benchmarks.chaos_faults import FaultInjection
from benchmarks.chaos_load import ask_all, difference, drill_requests
from benchmarks.chaos_plan import Fault, FaultKind
from benchmarks.harness import Service
from tests.end_to_end.test_lifecycle import is_idle
from tests.limits import wait_until

PLAN = (
    Fault(0.5, FaultKind.DRAFTER_KILLED, 0.0, 0.0),
    Fault(2.0, FaultKind.TARGET_STOPPED, 0.0, 1.0),
    Fault(4.0, FaultKind.ROUTER_STOPPED, 0.0, 1.0),
)


def test_a_short_drill_changes_no_answer_and_leaves_nothing(
    service: Service, prompts: list[str], tmp_path: Path
) -> None:
    drilled = ServiceUnderTest(service.url, service.process.pid)
    requests = drill_requests(seed=3, prompts=prompts[:8], max_tokens=48)
    undisturbed = asyncio.run(ask_all(service.url, requests, at_once=4))
    assert [outcome.error for outcome in undisturbed] == [None] * 8
    injection = FaultInjection(service.url, service.process.pid, tmp_path / "unused.json", seed=3)
    outcomes = asyncio.run(disturb(drilled, requests, PLAN, 6.0, injection))
    injection.finish()
    assert injection.missed == [] and len(injection.happened) == len(PLAN)
    assert [outcome.error for _, outcome in outcomes if outcome.error] == []
    assert [told for index, each in outcomes if (told := difference(each, undisturbed[index]))] == []
    wait_until_whole(drilled, replicas=1)
    wait_until(lambda: is_idle(service))
