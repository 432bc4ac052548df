"""The autoscaling policies: what they ask for, and that they neither leave their bounds nor flap."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaling import (
    ApplicationSettings,
    ApplicationState,
    Decisions,
    DrafterSettings,
    IngressSettings,
    ReplicaCounts,
    ScalingLimits,
    ServiceSnapshot,
    TargetSettings,
    decide,
)
from cluster.autoscaling.damping import Damping, damped
from workers.messages import DrafterPoolLoad, RouterLoad

LIMITS = ScalingLimits(1, 8, upscale_delay_s=10, downscale_delay_s=60, warm_up_s=0)
TARGETS = TargetSettings(LIMITS, sequences_per_target=16)
DRAFTERS = DrafterSettings(replace(LIMITS, min_replicas=0))
POOLS = ApplicationSettings(TARGETS, {"tiny": DRAFTERS}, IngressSettings(LIMITS, streams_per_replica=20))
PAYING = RouterLoad(
    running=8,
    kv_use=(0.3,),
    ttft_ms=500.0,
    itl_ms=40.0,
    draft_tokens=4.0,
    verifications=500,
    drafters_busy=0.6,
    exposed_draft_wait=0.1,
    drafter_pools=(DrafterPoolLoad("tiny", 1, 0, 8),),
)


def snapshot(load: RouterLoad, now_s: float = 0.0, targets: int = 1, drafters: int = 1) -> ServiceSnapshot:
    counts = ReplicaCounts(drafters, drafters)
    return ServiceSnapshot(now_s, load, ReplicaCounts(targets, targets), {"tiny": counts}, ReplicaCounts(1, 1))


def insist(
    load: RouterLoad, pools: ApplicationSettings = POOLS, targets: int = 1, drafters: int = 1, for_s: float = 61.0
) -> Decisions:
    """Show the same load for a while; return what is asked for first."""
    state = ApplicationState()
    before = Decisions(targets, {"tiny": drafters}, 1)
    for second in range(int(for_s) + 1):
        state, decisions = decide(pools, state, snapshot(load, second, targets, drafters))
        if decisions != before:
            return decisions
    return before


# --- targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "measured",
    [
        {"queue_wait_ms": 2_500.0, "waiting": 4},
        {"ttft_ms": 6_000.0},
        {"itl_ms": 400.0},
        {"kv_use": (0.95,)},
        {"running": 16, "waiting": 8},
    ],
)
def test_each_of_queue_wait_latency_kv_and_load_alone_asks_for_a_second_target(measured: dict[str, object]) -> None:
    assert insist(PAYING).targets == 1
    assert insist(replace(PAYING, **measured)).targets == 2


def test_targets_that_start_are_not_asked_for_again_however_long_their_start_takes() -> None:
    load, state, asked = replace(PAYING, running=16, waiting=10, queue_wait_ms=9_000.0), ApplicationState(), []
    wanted = 1
    for second in range(600):
        counts = ReplicaCounts(wanted, 1)
        state, decisions = decide(POOLS, state, replace(snapshot(load, second), targets=counts))
        wanted = decisions.targets
        asked.append(wanted)
    assert max(asked) == 2


def test_requests_count_before_any_target_is_warm() -> None:
    state, load = ApplicationState(), RouterLoad(running=16, waiting=30, kv_use=(0.5,))
    for second in range(11):
        state, decisions = decide(POOLS, state, replace(snapshot(load, second), targets=ReplicaCounts(1, 0)))
    assert decisions.targets == 3


def test_a_target_goes_only_if_the_others_have_room_for_its_sequences_and_their_kv() -> None:
    light = replace(PAYING, running=6, kv_use=(0.2, 0.2))
    assert insist(light, targets=2).targets == 1
    assert insist(replace(light, running=14), targets=2).targets == 2
    assert insist(replace(light, kv_use=(0.4, 0.4)), targets=2).targets == 2
    assert insist(replace(light, waiting=1), targets=2).targets == 2


def test_a_target_that_was_too_slow_with_its_load_is_not_expected_to_bear_it_again() -> None:
    state = ApplicationState()
    slow = replace(PAYING, running=10, itl_ms=300.0)
    state, _ = decide(POOLS, state, snapshot(slow))
    fine = replace(PAYING, running=10, itl_ms=100.0, kv_use=(0.2, 0.2))
    for second in range(1, 300):
        state, decisions = decide(POOLS, state, snapshot(fine, second, targets=2))
        assert decisions.targets == 2


def test_a_target_that_cannot_be_had_does_not_keep_the_others() -> None:
    state, idle = ApplicationState(), RouterLoad(kv_use=(0.0, 0.0))
    for second in range(61):
        counts = ReplicaCounts(3, 2)
        state, decisions = decide(POOLS, state, replace(snapshot(idle, second), targets=counts))
    assert decisions.targets == 1


# --- drafters -----------------------------------------------------------------------------------------------


def test_drafters_that_rounds_wait_for_get_help_in_proportion_to_targets() -> None:
    contended = replace(PAYING, exposed_draft_wait=0.4, drafters_busy=0.9)
    assert insist(contended).drafters["tiny"] == 2
    assert insist(contended, drafters=2).drafters["tiny"] == 2
    assert insist(contended, targets=2, drafters=2).drafters["tiny"] == 2  # two are not busy with the work of one
    assert insist(replace(contended, drafters_busy=1.9), targets=2, drafters=2).drafters["tiny"] == 3


def test_a_drafter_that_is_waited_for_without_being_busy_gets_no_help() -> None:
    assert insist(replace(PAYING, exposed_draft_wait=0.4, drafters_busy=0.3)).drafters["tiny"] == 1


@pytest.mark.parametrize("measured", [{"late_drafts": 0.2}, {"undrafted": 3}])
def test_late_drafts_and_sequences_without_a_drafter_ask_for_another(measured: dict[str, object]) -> None:
    assert insist(replace(PAYING, **measured)).drafters["tiny"] == 2


@pytest.mark.parametrize(
    "measured",
    [{"draft_tokens": 0.1}, {"drafter_pools": (DrafterPoolLoad("tiny", 1, 1, 8),)}],
    ids=["k is 0", "benched"],
)
def test_drafters_go_where_speculation_does_not_pay_and_come_back_with_a_lighter_load(
    measured: dict[str, object],
) -> None:
    state, in_vain = ApplicationState(), replace(PAYING, **measured)
    for second in range(61):
        state, decisions = decide(POOLS, state, snapshot(in_vain, second))
    assert decisions.drafters["tiny"] == 0
    without = replace(PAYING, draft_tokens=0.0, drafter_pools=())
    for second in range(61, 120):
        state, decisions = decide(POOLS, state, snapshot(without, second, drafters=0))
        assert decisions.drafters["tiny"] == 0
    for second in range(120, 131):
        state, decisions = decide(POOLS, state, snapshot(replace(without, running=4), second, drafters=0))
    assert decisions.drafters["tiny"] == 1


def test_a_drafter_is_tried_again_ever_more_rarely_while_it_does_not_pay() -> None:
    state, drafters, starts = ApplicationState(), 1, []
    for second in range(0, 8_000, 5):
        load = replace(PAYING, draft_tokens=0.1, drafter_pools=(DrafterPoolLoad("tiny", drafters, 0, 8),))
        state, decisions = decide(POOLS, state, snapshot(load, second, drafters=drafters))
        if decisions.drafters["tiny"] > drafters:
            starts.append(second)
        drafters = decisions.drafters["tiny"]
    gaps = [after - before for before, after in pairwise(starts)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps) and gaps[-1] > 3 * DRAFTERS.retry_s


def test_without_traffic_everything_returns_to_its_minimum() -> None:
    state, targets, drafters, ingress = ApplicationState(), 6, 6, 4
    for second in range(400):
        view = replace(snapshot(RouterLoad(kv_use=(0.0,) * targets), second, targets, drafters))
        state, decisions = decide(POOLS, state, replace(view, ingress=ReplicaCounts(ingress, ingress)))
        targets, drafters, ingress = decisions.targets, decisions.drafters["tiny"], decisions.ingress
    assert (targets, drafters, ingress) == (1, 0, 1)


def test_ingress_follows_open_streams_and_one_more_or_less_changes_nothing() -> None:
    assert insist(replace(PAYING, running=41), replace(POOLS, targets=None, drafters={})).ingress == 3
    state = ApplicationState()
    for second in range(600):
        view = replace(snapshot(replace(PAYING, running=20 + second % 2), second), ingress=ReplicaCounts(2, 2))
        state, decisions = decide(POOLS, state, view)
        assert decisions.ingress == 2


# --- what always holds --------------------------------------------------------------------------------------

shares = st.floats(0, 1)
loads = st.builds(
    RouterLoad,
    running=st.integers(0, 200),
    waiting=st.integers(0, 200),
    undrafted=st.integers(0, 5),
    kv_use=st.lists(shares, max_size=8).map(tuple),
    queue_wait_ms=st.none() | st.floats(0, 1e5),
    ttft_ms=st.none() | st.floats(0, 1e5),
    itl_ms=st.none() | st.floats(0, 1e4),
    exposed_draft_wait=shares,
    drafters_busy=st.floats(0, 8),
    late_drafts=shares,
    draft_tokens=st.floats(0, 8),
    verifications=st.integers(0, 1_000),
    drafter_pools=st.integers(0, 8).flatmap(
        lambda workers: st.integers(0, workers).map(lambda benched: (DrafterPoolLoad("tiny", workers, benched, 1),))
    ),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(loads, st.integers(1, 30), st.booleans()), min_size=1, max_size=40))
def test_bounds_delays_and_proportions_hold_for_any_loads(history: list[tuple[RouterLoad, int, bool]]) -> None:
    state, now = ApplicationState(), 0.0
    targets = drafters = ingress = 1
    changed_s = -1e9
    for load, seconds, warm in history:
        now += seconds
        view = ServiceSnapshot(
            now,
            load,
            ReplicaCounts(targets, targets if warm else 1),
            {"tiny": ReplicaCounts(drafters, drafters if warm else 0)},
            ReplicaCounts(ingress, ingress),
        )
        state, decisions = decide(POOLS, state, view)
        assert 1 <= decisions.targets <= 8 and 1 <= decisions.ingress <= 8
        assert 0 <= decisions.drafters["tiny"] <= 8
        if decisions.targets > targets:
            assert decisions.targets <= max(load.streams, 1)
            assert now - changed_s >= LIMITS.upscale_delay_s
        if decisions.targets < targets:
            assert now - changed_s >= LIMITS.downscale_delay_s
        if decisions.drafters["tiny"] > drafters:
            assert decisions.drafters["tiny"] <= DRAFTERS.most_per_target * decisions.targets
        if decisions.targets != targets:
            changed_s = now
        targets, drafters, ingress = decisions.targets, decisions.drafters["tiny"], decisions.ingress


@given(loads)
def test_what_serve_carries_of_a_load_is_the_load(load: RouterLoad) -> None:
    assert RouterLoad.from_metrics(load.as_metrics() | {"running_requests": 3.0}) == load


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_a_pool_changes_by_the_mildest_of_its_recent_wishes(wishes: list[int]) -> None:
    state, wanted = Damping(), 4
    for second, wish in enumerate(wishes):
        state, decision = damped(state, LIMITS, second, wanted, wish)
        if decision > wanted:
            recent = wishes[max(0, second - 10) : second + 1]
            assert len(recent) == 11 and decision == LIMITS.clipped(min(recent))
        assert decision >= wanted or len(wishes) > LIMITS.downscale_delay_s
        wanted = decision
