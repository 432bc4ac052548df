"""The failure drill of benchmarks/chaos.py: its plan repeats by seed, and its comparison misses nothing."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos_load import DrillRequest, Outcome, difference, drill_requests, longest_pauses
from benchmarks.chaos_plan import FaultKind, fault_plan, kinds_of
from benchmarks.recovery import silence_after


@given(seed=st.integers(), seconds=st.floats(0, 1200), every_s=st.floats(1, 60))
def test_a_plan_repeats_by_its_seed_is_bounded_in_time_and_ends_in_peace(
    seed: int, seconds: float, every_s: float
) -> None:
    plan = fault_plan(seed, seconds, every_s, list(FaultKind))
    assert plan == fault_plan(seed, seconds, every_s, list(FaultKind))
    periods = int(seconds / every_s)
    assert [int(fault.at_s / every_s + 1e-9) for fault in plan] == list(range(periods - 1))
    assert all(fault.at_s <= seconds - every_s for fault in plan)


def test_every_kind_comes_before_any_comes_again_and_seeds_differ() -> None:
    kinds = kinds_of(ranks=2, nodes=True)
    assert set(kinds) == set(FaultKind)
    plan = fault_plan(1, 10 * (3 * len(kinds) + 1), 10, kinds)
    for start in range(0, len(plan), len(kinds)):
        assert {fault.kind for fault in plan[start : start + len(kinds)]} == set(kinds)
    assert plan != fault_plan(2, 10 * (3 * len(kinds) + 1), 10, kinds)
    assert {fault.chosen(["b", "a"]) for fault in plan} == {"a", "b"} and plan[0].chosen([]) is None


def test_a_service_of_single_ranks_on_one_machine_loses_neither_ranks_nor_nodes() -> None:
    missing = {FaultKind.RANK_KILLED, FaultKind.RANK_STOPPED, FaultKind.NODE_REMOVED}
    assert set(FaultKind) - set(kinds_of(ranks=1, nodes=False)) == missing


def outcome(*events: dict[str, Any], leaves_after: int | None = None) -> Outcome:
    """What comes of a request whose stream has these events."""
    made = Outcome(DrillRequest({"stream": True}, leaves_after))
    for event in copy.deepcopy(events):
        made.note(event)
    return made


def part(ids: list[int], text: str, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    """An event of a stream with log-probabilities."""
    told = {"tokens": [str(token) for token in ids]}
    choice = {"index": index, "token_ids": ids, "text": text, "finish_reason": finish_reason, "logprobs": told}
    return {"choices": [choice]}


USAGE = {"choices": [], "usage": {"completion_tokens": 5}}
WHOLE = outcome(part([1, 2], "ab"), part([7], "x", "stop", 1), part([3, 4], "cd", "length"), USAGE)


def test_the_same_answer_in_other_parts_does_not_differ() -> None:
    in_one = outcome(part([1, 2, 3, 4], "abcd", "length"), part([7], "x", "stop", 1), USAGE)
    assert difference(in_one, WHOLE) is None


@pytest.mark.parametrize(
    "planted",
    [
        (part([1, 2], "ab"), part([7], "x", "stop", 1), part([3, 5], "cd", "length"), USAGE),
        (part([1, 2], "ab"), part([7], "x", "stop", 1), part([3, 4], "ce", "length"), USAGE),
        (part([1, 2], "ab"), part([7], "x", "stop", 1), part([2, 3, 4], "cd", "length"), USAGE),
        (part([1, 2], "ab"), part([7], "x", "stop", 1), part([3, 4], "cd", "stop"), USAGE),
        (part([1, 2], "ab"), part([7], "x", "stop", 1), part([3, 4], "cd", "length")),
        (part([1, 2], "ab"), part([3, 4], "cd", "length"), USAGE),
    ],
    ids=["other id", "other text", "a token twice", "other end", "no usage", "a choice missing"],
)
def test_whatever_differs_is_found(planted: tuple[dict[str, Any], ...]) -> None:
    assert difference(outcome(*planted), WHOLE) is not None


def test_an_answer_that_was_left_must_be_a_beginning() -> None:
    assert difference(outcome(part([1], "a"), leaves_after=1), WHOLE) is None
    assert difference(outcome(part([1, 3], "ac"), leaves_after=1), WHOLE) is not None


def test_a_pause_is_put_down_to_the_fault_within_it_or_else_before_it() -> None:
    stream = Outcome(DrillRequest({"stream": True}), came_s=[0.0, 1.0, 5.0, 6.5, 7.0])
    whole = Outcome(DrillRequest({}), came_s=[0.0, 100.0])
    faults = [(2.0, "killed", 0.0), (3.0, "stopped", 1.0), (6.8, "delayed", 1.0)]
    assert longest_pauses([stream, whole], faults) == {"": 1.0, "killed": 4.0, "stopped": 1.5, "delayed": 0.5}
    # What was lost while messages were dropped is waited for beyond the next fault.
    assert longest_pauses([stream], [(0.5, "dropped", 1.0), (2.0, "killed", 0.0)])["dropped"] == 4.0


def test_a_silence_counts_from_the_kill_and_only_if_it_begins_soon_after() -> None:
    assert silence_after(10.0, [9.9, 10.1, 10.2, 12.2, 20.0]) == 2.0
    assert silence_after(10.0, [9.0, 13.0, 13.1]) == 3.0
    assert silence_after(10.0, [9.0, 9.5]) == 0.0


def test_the_load_has_every_kind_of_request_and_repeats_by_its_seed() -> None:
    prompts = [f"prompt {number}" for number in range(24)]
    requests = drill_requests(5, prompts, 100)
    assert requests == drill_requests(5, prompts, 100) != drill_requests(6, prompts, 100)
    asked = {key for request in requests for key in request.body}
    assert {"n", "logprobs", "stream", "structured_outputs", "presence_penalty", "stop", "logit_bias"} <= asked
    assert len({request.body["seed"] for request in requests}) == len(prompts)
