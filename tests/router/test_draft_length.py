"""Draft length policies: what each decides, the rules all keep, and how the goodput policy holds and probes."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.draft_length import (
    DraftCandidate,
    DraftLengthName,
    DraftLengthOptions,
    DraftLengthPolicy,
    LaneView,
    draft_length_policy,
)
from workers.router.goodput import RoundTimes
from workers.router.step_times import StepTimeFit

TIMES = RoundTimes(StepTimeFit(30.0, 0.1), StepTimeFit(4.0, 0.02), overhead_ms=2.0)
VIEW = LaneView(TIMES, hidden_ms=0.0, max_groups=1)
UNKNOWN = LaneView(None, hidden_ms=0.0, max_groups=2)


def candidate(sequence_id: int = 0, limit: int = 8, rate: float = 0.7) -> DraftCandidate:
    return DraftCandidate(sequence_id, limit, rate, drafted=0, accepted=0, verifications=0)


def verified(before: DraftCandidate, drafted: int, accepted: int, rate: float | None = None) -> DraftCandidate:
    return replace(
        before,
        drafted=drafted,
        accepted=accepted,
        verifications=before.verifications + 1,
        rate=before.rate if rate is None else rate,
    )


def lengths_of(policy: DraftLengthPolicy, *candidates: DraftCandidate, view: LaneView = VIEW) -> Mapping[int, int]:
    return policy.plan(candidates, view).draft_tokens


def candidates_of() -> st.SearchStrategy[list[DraftCandidate]]:
    numbers = st.integers(0, 8)
    one = st.builds(
        lambda sequence_id, limit, rate, drafted, accepted, verifications: DraftCandidate(
            sequence_id, limit, rate, drafted, min(drafted, accepted), verifications
        ),
        st.integers(0, 9),
        numbers,
        st.floats(0.001, 0.999),
        numbers,
        numbers,
        st.integers(0, 50),
    )
    return st.lists(one, max_size=8, unique_by=lambda each: each.sequence_id)


@pytest.mark.parametrize("name", get_args(DraftLengthName))
@given(rounds=st.lists(st.tuples(candidates_of(), st.sampled_from([VIEW, UNKNOWN])), min_size=1, max_size=40))
@settings(max_examples=25)
def test_every_policy_answers_for_all_candidates_and_keeps_to_their_limits(
    name: DraftLengthName, rounds: list[tuple[list[DraftCandidate], LaneView]]
) -> None:
    policy = draft_length_policy(name)
    for number, (candidates, view) in enumerate(rounds):
        plan = policy.plan(candidates, view)
        assert set(plan.draft_tokens) == {each.sequence_id for each in candidates}
        assert all(0 <= plan.draft_tokens[each.sequence_id] <= each.limit for each in candidates)
        assert plan.groups >= 1 and 0 <= plan.least_confidence <= 1
        policy.forget(number % 10)


def test_an_unknown_policy_and_impossible_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="draft_length"):
        draft_length_policy("best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fixed_groups"):
        DraftLengthOptions(fixed_groups=0)
    for name, options in [
        ("confidence", DraftLengthOptions(least_confidence=1.5)),
        ("goodput", DraftLengthOptions(switch_gain=-0.1)),
        ("goodput", DraftLengthOptions(probe_every=1)),
    ]:
        with pytest.raises(ValueError, match=r"least_confidence|switch_gain|probe_every"):
            draft_length_policy(name, options)  # type: ignore[arg-type]


def test_the_default_is_goodput_and_every_lane_has_a_policy_of_its_own() -> None:
    assert type(draft_length_policy()) is type(draft_length_policy("goodput"))
    assert draft_length_policy() is not draft_length_policy()


# --- fixed and confidence ------------------------------------------------------------------------------------


def test_fixed_drafts_as_much_as_is_allowed_in_as_many_groups_as_it_was_told() -> None:
    plan = draft_length_policy("fixed", DraftLengthOptions(fixed_groups=2)).plan(
        [candidate(1, 8), candidate(2, 3, 0.01)], UNKNOWN
    )
    assert (plan.draft_tokens, plan.groups, plan.least_confidence) == ({1: 8, 2: 3}, 2, 0.0)


def test_confidence_drafts_as_much_as_is_allowed_and_leaves_the_end_to_the_drafter() -> None:
    plan = draft_length_policy("confidence", DraftLengthOptions(least_confidence=0.3)).plan([candidate()], VIEW)
    assert (plan.draft_tokens, plan.least_confidence) == ({0: 8}, 0.3)


# --- acceptance window ---------------------------------------------------------------------------------------


def test_the_window_grows_and_shrinks_by_one_token_per_verification() -> None:
    policy, sequence = draft_length_policy("acceptance_window"), candidate(rate=0.9)
    seen = [lengths_of(policy, sequence)[0]]
    for accepted_all in [True] * 6 + [False] * 10:
        length = seen[-1]
        sequence = verified(sequence, length, length if accepted_all else 0, 0.9 if accepted_all else 0.1)
        seen.append(lengths_of(policy, sequence)[0])
    assert seen == [4, 5, 6, 7, 8, 8, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]


def test_the_window_stays_between_its_bounds_and_without_news() -> None:
    policy, sequence = draft_length_policy("acceptance_window"), candidate(rate=0.6)
    assert lengths_of(policy, sequence)[0] == 4
    sequence = verified(sequence, 4, 2)
    assert [lengths_of(policy, sequence)[0] for _ in range(3)] == [4, 4, 4]
    sequence = verified(sequence, 4, 4, 0.9)
    assert [lengths_of(policy, sequence)[0] for _ in range(3)] == [5, 5, 5]
    sequence = verified(sequence, 0, 0)
    assert lengths_of(policy, sequence)[0] == 5


def test_the_window_keeps_to_the_limit_and_starts_anew_for_a_sequence_that_was_forgotten() -> None:
    policy, sequence = draft_length_policy("acceptance_window"), candidate(rate=0.9)
    lengths_of(policy, sequence)
    sequence = verified(sequence, 4, 4)
    assert lengths_of(policy, sequence)[0] == 5
    assert lengths_of(policy, replace(sequence, limit=2))[0] == 2
    assert lengths_of(policy, replace(sequence, limit=0))[0] == 0
    policy.forget(0)
    assert lengths_of(policy, sequence)[0] == 4


# --- goodput -------------------------------------------------------------------------------------------------


def test_until_times_are_known_little_is_drafted() -> None:
    assert lengths_of(draft_length_policy(), candidate(1, 8), candidate(2, 1), view=UNKNOWN) == {1: 2, 2: 1}


def test_as_soon_as_times_are_known_every_sequence_gets_what_suits_its_acceptance() -> None:
    policy = draft_length_policy()
    lengths_of(policy, candidate(1, 8, 0.01), candidate(2, 8, 0.9), view=UNKNOWN)
    lengths = lengths_of(policy, candidate(1, 8, 0.01), candidate(2, 8, 0.9))
    assert lengths[1] == 0 and lengths[2] >= 4


def first_plans(policy: DraftLengthPolicy, rate: float, plans: int) -> list[int]:
    return [lengths_of(policy, candidate(rate=rate))[0] for _ in range(plans)]


def test_it_switches_when_another_length_was_clearly_better_three_times_in_a_row() -> None:
    policy = draft_length_policy()
    held = first_plans(policy, 0.5, 2)[-1]
    assert first_plans(policy, 0.95, 2) == [held, held]
    assert first_plans(policy, 0.5, 1) == [held]
    changed = first_plans(policy, 0.95, 3)
    assert changed[:2] == [held, held] and changed[2] > held


def test_a_small_gain_is_taken_only_when_it_lasts() -> None:
    policy = draft_length_policy("goodput", DraftLengthOptions(probe_every=10_000))
    held = first_plans(policy, 0.7, 1)[0]
    better = first_plans(draft_length_policy(), 0.78, 1)[0]
    assert better == held + 1
    plans = first_plans(policy, 0.78, 40)
    assert plans[:20] == [held] * 20 and plans[-1] == better


def test_who_joins_and_leaves_does_not_change_the_others_lengths() -> None:
    policy = draft_length_policy()
    first = lengths_of(policy, candidate(1, 8, 0.6), candidate(2, 8, 0.8))
    # The rates have moved a little, and a third sequence comes and goes.
    joined = lengths_of(policy, candidate(1, 8, 0.65), candidate(2, 8, 0.76), candidate(3, 8, 0.9))
    policy.forget(3)
    left = lengths_of(policy, candidate(1, 8, 0.62), candidate(2, 8, 0.81))
    assert {key: joined[key] for key in first} == dict(first) == dict(left)
    assert joined[3] > first[2]


def test_a_change_of_membership_does_not_begin_the_count_of_better_plans_anew() -> None:
    policy = draft_length_policy()
    held = lengths_of(policy, candidate(1, 8, 0.3))[1]
    seen = [lengths_of(policy, candidate(1, 8, 0.95), candidate(number, 8, 0.95))[1] for number in (2, 3, 4)]
    assert seen[:2] == [held, held] and seen[2] > held


def test_a_neighbouring_length_is_probed_now_and_then_in_both_directions() -> None:
    policy = draft_length_policy("goodput", DraftLengthOptions(probe_every=32))
    seen = first_plans(policy, 0.7, 320)
    held = seen[0]
    probes = [length for length in seen if length != held]
    assert {held - 1, held + 1} == set(probes)
    assert 5 <= len(probes) <= 10


def test_a_sequence_whose_drafts_fail_gets_one_more_rarely_each_time() -> None:
    policy, sequence = draft_length_policy(), candidate(rate=0.01)
    probes = []
    for number in range(2000):
        length = lengths_of(policy, sequence)[0]
        sequence = verified(sequence, length, 0)
        if length:
            probes.append(number)
    pauses = [later - earlier for earlier, later in pairwise(probes)]
    assert 3 <= len(probes) <= 12
    assert pauses[-1] > 4 * pauses[0]


def test_a_drafter_nearly_as_slow_as_its_target_is_still_tried_now_and_then() -> None:
    policy = draft_length_policy()
    view = LaneView(RoundTimes(StepTimeFit(30.0, 0.1), StepTimeFit(28.0, 0.0), 0.0), 0.0, 1)
    lengths = [lengths_of(policy, candidate(rate=0.05), view=view)[0] for _ in range(1500)]
    assert 1 <= sum(lengths) <= 8


def test_a_sequence_whose_probe_succeeds_gets_the_next_one_soon() -> None:
    probes_by_accepted = {}
    for accepted in (0, 1):
        policy, sequence, probes = draft_length_policy(), candidate(rate=0.05), 0
        for _ in range(2000):
            length = lengths_of(policy, sequence)[0]
            sequence = verified(sequence, length, min(accepted, length))
            probes += length > 0
        probes_by_accepted[accepted] = probes
    assert probes_by_accepted[1] > 2 * probes_by_accepted[0]


def test_lanes_split_where_taking_turns_hides_the_drafting() -> None:
    times = RoundTimes(StepTimeFit(10.0, 0.1), StepTimeFit(8.0, 0.02), 4.0)
    sequences = [candidate(number, 6, 0.8) for number in range(32)]
    assert draft_length_policy().plan(sequences, LaneView(times, 0.0, 2)).groups == 2
    assert draft_length_policy().plan(sequences, LaneView(times, 0.0, 1)).groups == 1


def test_hidden_draft_time_makes_drafts_longer() -> None:
    plain, ahead = (
        lengths_of(draft_length_policy(), candidate(), view=LaneView(TIMES, hidden, 1))[0] for hidden in (0.0, 40.0)
    )
    assert ahead > plain
