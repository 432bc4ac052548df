"""Which router a new request is sent to."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deployments.router_choice import BUSIER, MORE_PER_TARGET, RouterView, preferred
from tests.router.helpers import request
from workers.messages import GenerationRequest, token_ids

VIEWS = st.lists(
    st.builds(
        RouterView,
        st.sampled_from([f"Router-{number}" for number in range(5)]),
        st.booleans(),
        st.integers(0, 3),
        st.integers(0, 40),
        st.sampled_from([0, 0, 3]),
        st.sampled_from([frozenset(), frozenset({"tiny"})]),
    ),
    max_size=5,
    unique_by=lambda view: view.name,
)
ASKED = st.tuples(st.integers(0, 50), st.sampled_from([None, "tiny"])).map(
    lambda pair: request(number=pair[0], drafter=pair[1])
)


def names(views: list[RouterView]) -> list[str]:
    return [view.name for view in views]


@given(VIEWS, ASKED)
def test_every_usable_router_is_asked_and_no_other_while_there_is_one(
    views: list[RouterView], asked: GenerationRequest
) -> None:
    order = preferred(views, asked)
    usable = {view.name for view in views if view.answers and view.targets}
    if usable:
        assert set(names(order)) == usable and len(order) == len(usable)
    else:
        assert len(order) == min(1, sum(view.answers for view in views))
        assert all(view.answers for view in order)


@given(VIEWS, ASKED)
def test_the_first_has_room_if_any_has_and_is_not_much_busier_than_another_with_room(
    views: list[RouterView], asked: GenerationRequest
) -> None:
    order = preferred(views, asked, most_running=16)
    if not order or not order[0].is_usable:
        return
    free = [view for view in order if not view.waiting and view.sequences < 16]
    if free:
        assert order[0] in free
        drafter = asked.speculation.drafter
        like = [view for view in free if drafter in view.drafters] or free
        least = min(view.load for view in (like if drafter else free))
        assert order[0].load <= BUSIER * least + MORE_PER_TARGET
    assert names(preferred(views[::-1], asked, most_running=16)) == names(order)


IDLE = [RouterView("Router-0", targets=1), RouterView("Router-1", targets=3), RouterView("Router-2", targets=0)]


def test_requests_that_begin_alike_share_a_router_unless_their_salt_differs() -> None:
    prefix = list(range(32))
    alike = [replace(request(), prompt=token_ids([*prefix, number])) for number in range(20)]
    assert len({preferred(IDLE, asked)[0].name for asked in alike}) == 1
    salted = [replace(asked, cache_salt=str(number)) for number, asked in enumerate(alike)]
    assert {preferred(IDLE, asked)[0].name for asked in salted} == {"Router-0", "Router-1"}


def test_a_router_keeps_its_prefixes_until_it_is_much_busier_than_another() -> None:
    routers = [RouterView(name, targets=2) for name in ("Router-0", "Router-1")]
    home, other = preferred(routers, request())
    busier = [replace(home, sequences=6), replace(other, sequences=2)]
    assert names(preferred(busier, request())) == [home.name, other.name]
    much_busier = [replace(home, sequences=7), replace(other, sequences=2)]
    assert names(preferred(much_busier, request())) == [other.name, home.name]


def test_unlike_requests_are_spread_by_the_number_of_targets() -> None:
    firsts = [preferred(IDLE, replace(request(), prompt=token_ids([number])))[0].name for number in range(800)]
    assert 150 < firsts.count("Router-0") < 250
    assert firsts.count("Router-0") + firsts.count("Router-1") == 800


def test_a_request_goes_where_its_drafter_is_but_rather_without_it_than_into_a_queue() -> None:
    asked = request(drafter="tiny")
    having = RouterView("Router-0", targets=1, sequences=9, drafters=frozenset({"tiny"}))
    without = RouterView("Router-1", targets=1)
    assert names(preferred([having, without], asked)) == ["Router-0", "Router-1"]
    assert names(preferred([replace(having, waiting=1), without], asked)) == ["Router-1", "Router-0"]
