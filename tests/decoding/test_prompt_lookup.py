"""Drafts looked up in the sequence itself, against a search that tries every place and every length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.decoding.prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH, look_up
from workers.messages import token_ids


def searched(tokens: list[int], most: int) -> list[int]:
    """The same by definition; what reaches the end goes on with what it has found so far."""
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                continued = list(tokens)
                while len(continued) < len(tokens) + most:
                    continued.append(continued[end + len(continued) - len(tokens)])
                return continued[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 9))
@settings(max_examples=500)
def test_the_continuation_is_that_of_the_latest_place_with_the_longest_match(tokens: list[int], most: int) -> None:
    assert look_up(token_ids(tokens), most).tolist() == searched(tokens, most)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 2], [2, 2]])
def test_nothing_is_found_where_too_little_recurs(text: list[int]) -> None:
    assert len(look_up(token_ids(text), 4)) == 0


def test_a_place_far_back_is_found() -> None:
    text = np.random.default_rng(1).integers(10, 30_000, 8000).astype(np.int32)
    text[:12] = range(12)
    text[-5:] = range(3, 8)
    assert look_up(text, 3).tolist() == [8, 9, 10]
