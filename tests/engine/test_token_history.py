"""The history of a sequence follows what was read, and every rollback."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.token_history import TokenHistory
from workers.messages import token_ids


@given(st.lists(st.tuples(st.integers(0, 200), st.lists(st.integers(0, 9), max_size=70)), max_size=12))
@settings(max_examples=200)
def test_a_write_replaces_everything_from_its_position_on(writes: list[tuple[int, list[int]]]) -> None:
    history, expected = TokenHistory(), []
    for position, tokens in writes:
        position %= len(expected) + 1
        history.write(position, token_ids(tokens))
        expected = expected[:position] + tokens
        assert history.tokens.tolist() == expected


def test_a_write_that_would_leave_a_gap_is_refused() -> None:
    history = TokenHistory()
    history.write(0, token_ids([1, 2]))
    with pytest.raises(ValueError, match="position 3 after 2"):
        history.write(3, token_ids([1]))
