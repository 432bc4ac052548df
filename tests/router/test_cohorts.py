"""Cohorts: everyone has one, they are even and similar in draft length, and few sequences ever move."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.cohorts import form_cohorts, random_cohorts

LENGTHS = st.dictionaries(st.integers(0, 99), st.integers(0, 8), max_size=40)
GROUPS = st.integers(1, 5)
CURRENT = st.dictionaries(st.integers(0, 99), st.integers(-1, 7), max_size=40)


def even(cohorts: dict[int, int], sequences: int, groups: int) -> bool:
    sizes = [list(cohorts.values()).count(label) for label in range(min(groups, max(sequences, 1)))]
    return sum(sizes) == len(cohorts) == sequences and max(sizes) - min(sizes) <= 1


def moved(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(before[sequence] != label for sequence, label in after.items() if sequence in before)


@given(lengths=LENGTHS, groups=GROUPS, current=CURRENT)
@settings(max_examples=300)
def test_every_sequence_has_one_group_and_groups_are_even(
    lengths: dict[int, int], groups: int, current: dict[int, int]
) -> None:
    cohorts = form_cohorts(lengths, groups, current)
    assert set(cohorts) == set(lengths)
    assert even(cohorts, len(lengths), groups)


@given(lengths=LENGTHS, groups=GROUPS)
@settings(max_examples=200)
def test_groups_that_begin_are_contiguous_in_draft_length(lengths: dict[int, int], groups: int) -> None:
    cohorts = form_cohorts(lengths, groups, {})
    in_order = sorted(lengths, key=lambda sequence: (cohorts[sequence], lengths[sequence]))
    assert [lengths[sequence] for sequence in in_order] == sorted(lengths.values())


@given(lengths=LENGTHS, groups=GROUPS)
@settings(max_examples=200)
def test_without_a_change_nobody_moves(lengths: dict[int, int], groups: int) -> None:
    cohorts = form_cohorts(lengths, groups, {})
    assert form_cohorts(lengths, groups, cohorts) == cohorts


@given(lengths=LENGTHS, groups=GROUPS, current=CURRENT)
@settings(max_examples=300)
def test_from_any_state_it_settles(lengths: dict[int, int], groups: int, current: dict[int, int]) -> None:
    cohorts = form_cohorts(lengths, groups, current)
    for _ in range(4):
        cohorts = form_cohorts(lengths, groups, cohorts)
    assert form_cohorts(lengths, groups, cohorts) == cohorts


@given(lengths=LENGTHS.filter(bool), groups=GROUPS, data=st.data())
@settings(max_examples=200)
def test_one_token_more_or_less_for_one_sequence_moves_nobody(
    lengths: dict[int, int], groups: int, data: st.DataObject
) -> None:
    cohorts = form_cohorts(lengths, groups, {})
    changed = data.draw(st.sampled_from(sorted(lengths)))
    later = {**lengths, changed: lengths[changed] + data.draw(st.sampled_from([-1, 1]))}
    assert form_cohorts(later, groups, cohorts) == cohorts


@given(lengths=LENGTHS.filter(bool), groups=GROUPS, data=st.data())
@settings(max_examples=200)
def test_who_leaves_moves_few_others(lengths: dict[int, int], groups: int, data: st.DataObject) -> None:
    cohorts = form_cohorts(lengths, groups, {})
    leaving = data.draw(st.sampled_from(sorted(lengths)))
    later = {sequence: length for sequence, length in lengths.items() if sequence != leaving}
    if len(later) >= groups and max(lengths.values()) - min(lengths.values()) <= 1:
        assert moved(cohorts, form_cohorts(later, groups, cohorts)) <= 1


@given(lengths=LENGTHS, groups=GROUPS, current=CURRENT)
@settings(max_examples=100)
def test_the_order_of_the_arguments_does_not_matter(
    lengths: dict[int, int], groups: int, current: dict[int, int]
) -> None:
    backwards = dict(reversed(lengths.items())), dict(reversed(current.items()))
    assert form_cohorts(backwards[0], groups, backwards[1]) == form_cohorts(lengths, groups, current)


def test_a_sequence_whose_draft_length_has_gone_elsewhere_changes_its_group() -> None:
    lengths = {0: 1, 1: 1, 2: 1, 3: 6, 4: 6, 5: 6}
    before = form_cohorts(lengths, 2, {})
    after = form_cohorts({**lengths, 0: 6, 3: 1}, 2, before)
    assert after == {**before, 0: before[3], 3: before[0]}


def test_labels_stay_with_their_members_whatever_the_order_of_their_lengths() -> None:
    lengths = {0: 7, 1: 7, 2: 0, 3: 0}
    assert form_cohorts(lengths, 2, {0: 0, 1: 0, 2: 1, 3: 1}) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_there_are_at_most_as_many_groups_as_sequences() -> None:
    assert form_cohorts({}, 3, {1: 0}) == {}
    assert sorted(form_cohorts({1: 4, 2: 4}, 5, {}).values()) == [0, 1]


def test_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups"):
        form_cohorts({1: 4}, 0, {})
    with pytest.raises(ValueError, match="groups"):
        random_cohorts({1: 4}, 0, seed=1)


@given(lengths=LENGTHS, groups=GROUPS, seed=st.integers(0, 1000))
@settings(max_examples=100)
def test_cohorts_by_lot_are_even_and_repeatable(lengths: dict[int, int], groups: int, seed: int) -> None:
    cohorts = random_cohorts(lengths, groups, seed)
    assert set(cohorts) == set(lengths) and even(cohorts, len(lengths), groups)
    assert random_cohorts(lengths, groups, seed) == cohorts


def test_cohorts_by_lot_do_not_look_at_draft_lengths() -> None:
    lengths = {sequence: sequence // 8 for sequence in range(16)}
    together = Counter(
        random_cohorts(lengths, 2, seed)[0] == random_cohorts(lengths, 2, seed)[1] for seed in range(200)
    )
    assert 60 < together[True] < 140
