"""How workers are dealt out to routers, and how the loads of routers become one."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling import merged_load
from cluster.shards import Sharding, dealt
from workers.messages import DrafterPoolLoad, RouterLoad

ROUTERS, REPLICAS = st.integers(1, 5), st.integers(0, 24)


@given(ROUTERS, REPLICAS, REPLICAS)
def test_all_workers_are_dealt_out_targets_evenly_and_drafters_in_proportion(
    routers: int, targets: int, drafters: int
) -> None:
    sharding = Sharding(routers)
    owned, drafting = sharding.targets(targets), sharding.drafters(drafters, targets)
    assert (sum(owned), sum(drafting)) == (targets, drafters)
    assert max(owned) - min(owned) <= 1
    for own, draft in zip(owned, drafting, strict=True):
        exact = drafters * own / targets if targets else drafters / routers
        assert abs(draft - exact) <= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), REPLICAS)
def test_one_replica_more_takes_none_away_from_anybody(weights: list[int], count: int) -> None:
    fewer, more = dealt(count, weights), dealt(count + 1, weights)
    assert sorted(after - before for before, after in zip(fewer, more, strict=True))[:-1] == [0] * (len(weights) - 1)
    assert all(share == 0 for share, weight in zip(more, weights, strict=True) if weight == 0)


def test_drafters_follow_a_fixed_number_of_targets_however_many_are_registered() -> None:
    assert Sharding(2, fixed_targets=3).drafters(6, targets=1) == (4, 2)
    assert Sharding(2).drafters(6, targets=4) == (3, 3)


BUSY = RouterLoad(
    window_s=30.0,
    running=8,
    waiting=2,
    undrafted=1,
    kv_use=(0.5,),
    queue_wait_ms=900.0,
    itl_ms=40.0,
    exposed_draft_wait=0.4,
    drafters_busy=0.9,
    late_drafts=0.1,
    draft_tokens=4.0,
    accepted_length=3.0,
    verifications=300,
    drafter_pools=(DrafterPoolLoad("tiny", 2, 1, 7),),
)


def test_counts_are_added_the_worst_wait_stands_for_all_and_means_are_of_all_verifications() -> None:
    calm = RouterLoad(
        window_s=20.0,
        running=2,
        kv_use=(0.1, 0.2),
        queue_wait_ms=5.0,
        ttft_ms=80.0,
        draft_tokens=8.0,
        accepted_length=5.0,
        verifications=100,
        drafters_busy=0.2,
        drafter_pools=(DrafterPoolLoad("small", 1, 0, 1), DrafterPoolLoad("tiny", 1, 0, 1)),
    )
    load = merged_load([BUSY, calm])
    assert (load.running, load.waiting, load.undrafted, load.verifications) == (10, 2, 1, 400)
    assert load.kv_use == (0.5, 0.1, 0.2)
    assert (load.queue_wait_ms, load.ttft_ms, load.itl_ms) == (900.0, 80.0, 40.0)
    assert (load.draft_tokens, load.accepted_length) == (5.0, 3.5)
    assert (round(load.exposed_draft_wait, 6), round(load.late_drafts, 6)) == (0.3, 0.075)
    assert round(load.drafters_busy, 6) == 1.1
    assert load.drafter_pools == (DrafterPoolLoad("small", 1, 0, 1), DrafterPoolLoad("tiny", 3, 1, 8))


def test_a_router_without_drafters_says_nothing_of_drafts_but_that_its_clients_lack_one() -> None:
    without = RouterLoad(running=5, verifications=900, accepted_length=1.0, kv_use=(0.2,))
    load = merged_load([BUSY, without])
    assert (load.draft_tokens, load.accepted_length, load.exposed_draft_wait) == (4.0, 3.0, 0.4)
    assert load.undrafted == 1 + 5
    nobody = merged_load([without, replace(without, verifications=0, accepted_length=None)])
    assert (nobody.undrafted, nobody.accepted_length, nobody.running) == (0, 1.0, 10)


def test_the_load_of_one_router_is_its_own() -> None:
    assert merged_load([BUSY]) == BUSY
    assert merged_load([RouterLoad(), RouterLoad()]) == RouterLoad()
