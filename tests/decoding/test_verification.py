"""The walk along a chain: drafts are kept up to the first mismatch, and one token of the target's own follows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from workers.decoding.verification import verify_chain
from workers.messages import NO_TOKENS, token_ids


@pytest.mark.parametrize(
    ("drafts", "drawn", "accepted", "committed"),
    [
        ([], [5], 0, [5]),
        ([1], [1, 2], 1, [1, 2]),
        ([1], [3, 2], 0, [3]),
        ([1, 2, 3], [1, 2, 3, 4], 3, [1, 2, 3, 4]),
        ([1, 2, 3], [1, 2, 9, 4], 2, [1, 2, 9]),
        ([1, 2, 3], [1, 9, 3, 4], 1, [1, 9]),
        ([1, 2, 3], [9, 2, 3, 4], 0, [9]),
        ([7, 7, 7], [7, 8, 7, 7], 1, [7, 8]),
    ],
    ids=[
        "k = 0",
        "all of one",
        "none of one",
        "all",
        "two",
        "one, then a match again",
        "none, then matches",
        "repeats",
    ],
)
def test_drafts_count_up_to_the_first_mismatch(
    drafts: list[int], drawn: list[int], accepted: int, committed: list[int]
) -> None:
    outcome = verify_chain(token_ids(drawn), token_ids(drafts))

    assert outcome.accepted == accepted
    assert outcome.token_ids.tolist() == committed
    assert outcome.token_ids.dtype == np.int32


@pytest.mark.parametrize(("draws", "drafts"), [(0, 0), (1, 1), (3, 3), (2, 5), (5, 2)])
def test_a_chain_of_k_drafts_needs_k_plus_1_draws(draws: int, drafts: int) -> None:
    with pytest.raises(ValueError, match=f"{drafts} drafts needs {drafts + 1} draws, got {draws}"):
        verify_chain(token_ids([1] * draws), token_ids([1] * drafts))


def test_without_drafts_verification_is_plain_decoding() -> None:
    assert verify_chain(token_ids([4]), NO_TOKENS).token_ids.tolist() == [4]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8), st.integers(0, 2))
@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
def test_the_walk_is_the_one_of_the_definition(pairs: list[tuple[int, int]], bonus: int) -> None:
    drafts = [draft for draft, _ in pairs]
    drawn = [own for _, own in pairs] + [bonus]
    walked: list[int] = []
    for draft, own in zip([*drafts, None], drawn, strict=True):
        walked.append(own)
        if draft != own:
            break

    outcome = verify_chain(token_ids(drawn), token_ids(drafts))

    assert outcome.token_ids.tolist() == walked
    assert outcome.accepted == len(walked) - 1
