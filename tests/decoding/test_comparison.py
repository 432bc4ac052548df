"""Where two answers part."""

import pytest

from workers.decoding.comparison import Difference, first_difference
from workers.messages import token_ids


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ([], [], None),
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 6], Difference(1, 2, 5)),
        ([1, 2, 3], [1, 2], Difference(2, 3, None)),
        ([], [7], Difference(0, None, 7)),
    ],
)
def test_the_first_difference_is_found_by_position_and_both_ids(
    first: list[int], second: list[int], difference: Difference | None
) -> None:
    assert first_difference(first, second) == difference
    assert first_difference(token_ids(first), token_ids(second)) == difference


def test_positions_count_from_where_the_answer_begins() -> None:
    assert first_difference([4, 5], [4, 6], position=10) == Difference(11, 5, 6)
