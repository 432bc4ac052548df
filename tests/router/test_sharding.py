"""Several routers: who owns which worker, and who serves which request."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.sharding import router_for, share_out

NAMES = st.sampled_from(["router-a", "router-b", "router-c", "router-d", "router-e"])
routers = st.lists(NAMES, unique=True, min_size=1, max_size=5)
targets = st.integers(0, 12).map(lambda count: [f"target-{index}" for index in range(count)])
drafters = st.dictionaries(st.sampled_from(["tiny", "small"]), st.integers(0, 12), max_size=2).map(
    lambda counts: {name: [f"{name}-{index}" for index in range(count)] for name, count in counts.items()}
)
workers = [f"target-{index}" for index in range(12)] + [f"tiny-{index}" for index in range(12)]
owners = st.dictionaries(st.sampled_from(workers), NAMES)


def count(shared: dict[str, str], ids: list[str], router: str) -> int:
    return sum(shared[each] == router for each in ids)


@given(routers, targets, drafters, owners)
def test_every_worker_has_one_router_and_shares_are_even_whatever_held_before(
    routers: list[str], targets: list[str], drafters: dict[str, list[str]], before: dict[str, str]
) -> None:
    shared = share_out(routers, targets, drafters, before)
    assert shared.keys() == {*targets, *(each for ids in drafters.values() for each in ids)}
    assert set(shared.values()) <= set(routers)
    owned = {router: count(shared, targets, router) for router in routers}
    assert max(owned.values()) - min(owned.values()) <= 1
    for ids in drafters.values():
        for router in routers:
            exact = len(ids) * owned[router] / len(targets) if targets else len(ids) / len(routers)
            assert abs(count(shared, ids, router) - exact) < 1


@given(routers, targets, drafters, owners)
def test_what_is_shared_out_already_stays(
    routers: list[str], targets: list[str], drafters: dict[str, list[str]], before: dict[str, str]
) -> None:
    shared = share_out(routers, targets, drafters, before)
    assert share_out(routers, targets, drafters, shared) == shared
    assert share_out(routers[::-1], targets[::-1], drafters, shared) == shared


@given(routers, targets, NAMES)
def test_a_router_that_comes_or_goes_moves_only_the_targets_that_it_gets_or_leaves(
    routers: list[str], targets: list[str], other: str
) -> None:
    few, many = [router for router in routers if router != other], [*{*routers, other}]
    for earlier, later in ((few, many), (many, few)):
        before = share_out(earlier, targets, {}, {})
        after = share_out(later, targets, {}, before)
        moved = [each for each in after if before.get(each) != after[each]]
        assert all(before.get(each) == other or after[each] == other or not earlier for each in moved)


def test_drafters_are_where_targets_are() -> None:
    shared = share_out(["a", "b"], ["target-0"], {"tiny": ["tiny-0", "tiny-1"]}, {})
    assert len(set(shared.values())) == 1


def test_without_routers_nobody_owns_anything() -> None:
    assert share_out([], ["target-0"], {"tiny": ["tiny-0"]}, {"target-0": "gone"}) == {}


@given(st.integers().map(str), st.dictionaries(NAMES, st.integers(0, 4)), NAMES)
@settings(max_examples=60)
def test_a_key_moves_only_to_a_router_that_comes_or_away_from_one_that_goes(
    key: str, owned: dict[str, int], other: str
) -> None:
    without = {router: targets for router, targets in owned.items() if router != other}
    first, second = router_for(key, without), router_for(key, without | {other: 2})
    assert second in (first, other)
    assert (first is None) == (not any(without.values()))
    assert first is None or without[first] > 0


def test_routers_serve_as_many_keys_as_they_have_targets() -> None:
    served = Counter(router_for(f"request-{number}", {"a": 1, "b": 3, "c": 0}) for number in range(4_000))
    assert set(served) == {"a", "b"}
    assert 900 < served["a"] < 1_100
