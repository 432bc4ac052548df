"""The choice of a drafter: it finds the good one of each class of traffic, and finds it again when it changes."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from workers.router.drafter_choice import DrafterChoice

ROUNDS = 20
DRAFTED = 4
NAMES = ("large", "small")


def serve(
    choice: DrafterChoice, traffic_class: str, rates: Mapping[str, float], requests: int, numbers: random.Random
) -> Counter[str]:
    """Let requests of some rounds each choose and report; how often each drafter was chosen."""
    chosen: Counter[str] = Counter()
    for _ in range(requests):
        name = choice.choose(traffic_class, NAMES)
        chosen[name] += 1
        for _ in range(ROUNDS):
            accepted = 0
            while accepted < DRAFTED and numbers.random() < rates[name]:
                accepted += 1
            choice.observe(traffic_class, name, DRAFTED, accepted)
    return chosen


@pytest.mark.parametrize("seed", range(8))
def test_within_two_hundred_requests_every_class_uses_its_good_drafter(seed: int) -> None:
    choice, numbers = DrafterChoice(seed), random.Random(seed + 100)
    code = serve(choice, "code", {"large": 0.3, "small": 0.8}, 200, numbers)
    chat = serve(choice, "chat", {"large": 0.8, "small": 0.3}, 200, numbers)
    assert code["small"] >= 180
    assert chat["large"] >= 180


@pytest.mark.parametrize("seed", range(8))
def test_when_the_good_drafter_changes_the_choice_follows(seed: int) -> None:
    choice, numbers = DrafterChoice(seed), random.Random(seed)
    serve(choice, "code", {"large": 0.3, "small": 0.8}, 300, numbers)
    serve(choice, "code", {"large": 0.8, "small": 0.3}, 100, numbers)
    assert serve(choice, "code", {"large": 0.8, "small": 0.3}, 200, numbers)["large"] >= 180


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_has_become_better_is_found_though_the_other_is_no_worse(seed: int) -> None:
    choice, numbers = DrafterChoice(seed), random.Random(seed)
    serve(choice, "code", {"large": 0.3, "small": 0.6}, 300, numbers)
    serve(choice, "code", {"large": 0.9, "small": 0.6}, 400, numbers)
    assert serve(choice, "code", {"large": 0.9, "small": 0.6}, 200, numbers)["large"] >= 160


def test_a_drafter_that_does_not_exist_for_now_is_not_chosen() -> None:
    choice, numbers = DrafterChoice(), random.Random(0)
    serve(choice, "code", {"large": 0.3, "small": 0.8}, 50, numbers)
    assert {choice.choose("code", ["large"]) for _ in range(20)} == {"large"}
    assert {choice.choose("code", ["large", "new"]) for _ in range(50)} == {"large", "new"}
    with pytest.raises(ValueError, match="names"):
        choice.choose("code", [])


def test_choices_are_repeatable_and_do_not_depend_on_the_order_of_names() -> None:
    def choices(names: tuple[str, ...]) -> list[str]:
        choice = DrafterChoice(seed=7)
        return [choice.choose("code", names) for _ in range(50)]

    assert choices(("a", "b", "c")) == choices(("a", "b", "c")) == choices(("c", "a", "b"))
    assert set(choices(("a", "b", "c"))) == {"a", "b", "c"}


def sure(choice: DrafterChoice, traffic_class: str) -> bool:
    return len({choice.choose(traffic_class, NAMES) for _ in range(60)}) == 1


def teach(choice: DrafterChoice, traffic_class: str) -> None:
    for _ in range(100):
        choice.observe(traffic_class, "large", 4, 4)
        choice.observe(traffic_class, "small", 4, 0)


def test_the_number_of_classes_is_bounded_and_the_stalest_is_forgotten() -> None:
    choice = DrafterChoice(most_classes=2)
    teach(choice, "one")
    teach(choice, "two")
    assert sure(choice, "one")
    teach(choice, "three")
    assert sure(choice, "one") and sure(choice, "three")
    assert not sure(choice, "two")


def test_rounds_without_drafts_are_no_evidence() -> None:
    choice, untouched = DrafterChoice(seed=1), DrafterChoice(seed=1)
    for _ in range(1000):
        choice.observe("code", "large", 0, 0)
    assert [choice.choose("code", NAMES) for _ in range(40)] == [untouched.choose("code", NAMES) for _ in range(40)]


@pytest.mark.parametrize("wrong", [{"memory_verifications": 1.0}, {"most_classes": 0}])
def test_impossible_settings_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DrafterChoice(**wrong)
