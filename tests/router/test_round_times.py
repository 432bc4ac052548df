"""What is learnt of the times of rounds: from which of them, and for which."""

import time
from collections.abc import Sequence

import pytest

from tests.fakes.workers import ScriptedDrafter
from workers.messages import Proposal, ProposedItem, ProposeItem, ProposeRequest, ProposeResponse, token_ids
from workers.router.ahead import LEAST_STEPS
from workers.router.config import RouterConfig
from workers.router.draft_length import DraftCandidate, DraftPlan, LaneView
from workers.router.draft_planning import LONGEST_LEARNING, DraftPlanner, LaneTimes
from workers.router.peer import Peer
from workers.router.roster import MOST_READ_TOKENS, Roster
from workers.router.step_times import StepTimeFit
from workers.router.totals import RoundClock


def observe_round(times: LaneTimes, wall_ms: float, asked_ms: float = 0.0, drafting_ms: float = 0.0) -> None:
    """A round with a verification of 30 ms; drafts were waited for `asked_ms`, and computed in `drafting_ms`."""
    clock = RoundClock(time.perf_counter() - wall_ms / 1e3, asked_ms, drafting_ms, 30.0, 30.0)
    times.observe_round(clock, True, drafting_ms > 0, 10.0 if drafting_ms else None)


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)


def test_the_overhead_of_rounds_with_drafts_is_not_that_of_plain_ones() -> None:
    times = LaneTimes()
    # 30 ms are verified, 12 ms waited for 10 ms of drafting, and 5 ms are anything else.
    observe_round(times, 47.0, 12.0, 10.0)
    assert times.overhead_ms() == pytest.approx(5.0)  # the best guess for rounds without drafts
    assert times.draft_overhead_ms() == pytest.approx(2.0)
    observe_round(times, 31.0)
    assert times.overhead_ms() == pytest.approx(1.0)
    assert times.draft_overhead_ms() == pytest.approx(6.0)


def test_plain_rounds_that_took_longer_do_not_make_drafts_cheaper_than_they_are() -> None:
    times = LaneTimes()
    observe_round(times, 47.0, 12.0, 10.0)
    observe_round(times, 50.0)
    assert times.overhead_ms() == pytest.approx(20.0)
    assert times.draft_overhead_ms() == pytest.approx(2.0)


def observe_ahead(times: LaneTimes, waited_ms: float) -> None:
    """A round after drafting ahead; asking for its drafts would have taken 10 ms and what asking takes beside."""
    clock = RoundClock(90.0, waited_ms, 0.0, 30.0, 30.0, drafted_ahead=True)
    times.observe_round(clock, True, True, 10.0)


def test_drafting_ahead_saves_what_a_round_waits_less_and_costs_what_it_waits_longer() -> None:
    times = LaneTimes()
    observe_round(times, 47.0, 12.0, 10.0)
    observe_ahead(times, 0.5)
    assert times.ahead.saved_ms.value == pytest.approx(11.5)
    assert times.draft_overhead_ms() == pytest.approx(2.0)  # of asking, which the round did not do
    # A miss: the drafter was at it for long, and was asked after that.
    observe_ahead(times, 31.5)
    assert times.ahead.saved_ms.value == pytest.approx((11.5 - 19.5) / 2)


def test_a_drafter_that_is_seldom_through_in_time_is_not_let_draft_ahead_though_it_hits() -> None:
    times = LaneTimes()
    for tokens in (4, 8):
        times.observe_step(tokens, 30.0, beside_drafting=False, reads_prompts=False)
    observe_round(times, 47.0, 12.0, 10.0)
    for _ in range(4):
        times.observe_step(8, 36.0, beside_drafting=True, reads_prompts=False)
        observe_ahead(times, 9.0)
    assert not times.ahead.wants(30.0)


def proposals(read_tokens: int, drafts: int) -> tuple[ProposeRequest, ProposeResponse]:
    """Two sequences that read `read_tokens` tokens each; 12 ms."""
    asked = tuple(ProposeItem(number, 0, 0, token_ids([1] * read_tokens), drafts) for number in range(2))
    told = tuple(ProposedItem(number, 0, Proposal(token_ids([1] * drafts))) for number in range(2))
    return ProposeRequest(asked), ProposeResponse(told, 12.0)


def test_a_drafter_that_read_much_before_it_drafted_does_not_count_as_slow_at_drafting() -> None:
    roster, drafter = Roster(), ScriptedDrafter("draft-0")
    roster.add(Peer(drafter.registration, drafter))
    roster.observe_steps("draft-0", *proposals(MOST_READ_TOKENS + 1, 3))
    assert roster.step_fit("draft-0") is None
    roster.observe_steps("draft-0", *proposals(MOST_READ_TOKENS, 3))
    assert roster.step_fit("draft-0") == StepTimeFit(4.0, 0.0)


class NotedViews:
    """A policy that drafts nothing and notes how many groups it may form."""

    def __init__(self) -> None:
        self.max_groups: list[int] = []

    def plan(self, candidates: Sequence[DraftCandidate], view: LaneView) -> DraftPlan:
        """See `DraftLengthPolicy.plan`."""
        self.max_groups.append(view.max_groups)
        return DraftPlan({})

    def forget(self, sequence_id: int) -> None:
        """See `DraftLengthPolicy.forget`."""


def noted_groups(slowdown: float | None, draft_ahead: bool = True, plans: int = 1) -> list[int]:
    policy = NotedViews()
    planner = DraftPlanner(policy, Roster(), RouterConfig(max_cohorts=2, draft_ahead=draft_ahead))
    for _ in range(LEAST_STEPS if slowdown else 0):
        planner.times.ahead.slowdown.observe(slowdown or 1.0)
    for _ in range(plans):
        planner.plan([])
    return policy.max_groups


def test_cohorts_take_turns_only_once_it_is_known_that_the_target_does_not_feel_its_drafter() -> None:
    assert noted_groups(slowdown=1.0) == [2]
    assert noted_groups(slowdown=1.4) == [1]
    assert noted_groups(slowdown=None, draft_ahead=False) == [2]
    # Where nothing is drafted ahead, it is never known.
    assert noted_groups(slowdown=None, plans=LONGEST_LEARNING + 1) == [1] * LONGEST_LEARNING + [2]
