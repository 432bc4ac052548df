"""The walk along a proposal: drafts are kept up to the first mismatch, and one token of the target's own follows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from workers.decoding.verification import verify_chain, verify_coupled, verify_tree
from workers.messages import NO_TOKENS, Proposal, token_ids


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
@hypothesis_settings(max_examples=80)
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


# --- trees ---------------------------------------------------------------------------------------------------

#      1 ── 2 ── 3        nodes 0, 2, 4
#      └─── 4             node  3
#      5 ── 2             nodes 1, 5
DRAFTS, PARENTS = [1, 5, 2, 4, 3, 2], [-1, -1, 0, 0, 2, 1]


@pytest.mark.parametrize(
    ("drawn", "nodes", "committed"),
    [
        ([9, 0, 0, 0, 0, 0, 0], [], [9]),
        ([1, 9, 0, 0, 0, 0, 0], [0], [1, 9]),
        ([1, 4, 0, 0, 7, 0, 0], [0, 3], [1, 4, 7]),
        ([1, 2, 0, 3, 0, 8, 0], [0, 2, 4], [1, 2, 3, 8]),
        ([5, 0, 2, 0, 0, 0, 6], [1, 5], [5, 2, 6]),
        ([5, 2, 9, 0, 0, 0, 0], [1], [5, 9]),
        ([2, 2, 2, 3, 0, 0, 0], [], [2]),
    ],
    ids=["nothing", "one", "the other child", "to the leaf", "the other root", "a cousin's token", "a deep match"],
)
def test_a_tree_is_walked_to_the_child_that_was_drawn(drawn: list[int], nodes: list[int], committed: list[int]) -> None:
    outcome = verify_tree(token_ids(drawn), token_ids(DRAFTS), token_ids(PARENTS))

    assert outcome.nodes.tolist() == nodes
    assert outcome.accepted == len(nodes)
    assert outcome.token_ids.tolist() == committed
    assert outcome.nodes.dtype == outcome.token_ids.dtype == np.int32


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8), st.integers(0, 2))
@hypothesis_settings(max_examples=80)
def test_a_chain_is_a_tree_without_branches(pairs: list[tuple[int, int]], bonus: int) -> None:
    drafts = token_ids([draft for draft, _ in pairs])
    drawn = token_ids([own for _, own in pairs] + [bonus])
    chain = verify_chain(drawn, drafts)

    tree = verify_coupled(drawn, Proposal(drafts, parents=token_ids(list(range(-1, len(pairs) - 1)))))

    assert tree.accepted == chain.accepted
    assert tree.token_ids.tolist() == chain.token_ids.tolist()


@given(st.data())
@hypothesis_settings(max_examples=80)
def test_the_walk_follows_draws_for_as_long_as_some_child_has_them(data: st.DataObject) -> None:
    drafts: list[int] = []
    parents: list[int] = []
    for node in range(data.draw(st.integers(0, 12))):
        parent = data.draw(st.integers(-1, node - 1))
        siblings = {drafts[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(4) if token not in siblings]
        if free:
            drafts.append(data.draw(st.sampled_from(free)))
            parents.append(parent)
        else:
            drafts.append(100 + node)
            parents.append(parent)
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    node, committed = -1, []
    while True:
        committed.append(drawn[node + 1])
        below = [child for child in range(len(drafts)) if (parents[child], drafts[child]) == (node, committed[-1])]
        if not below:
            break
        node = below[0]

    outcome = verify_tree(token_ids(drawn), token_ids(drafts), token_ids(parents))

    assert outcome.token_ids.tolist() == committed
    assert [drafts[each] for each in outcome.nodes] == committed[:-1]


@pytest.mark.parametrize(
    ("draws", "drafts", "parents", "complaint"),
    [
        (2, [1, 2], [-1, 0], "tree of 2 drafts needs 3 draws, got 2"),
        (3, [1, 2], [-1], "tree of 2 drafts has 1 parents"),
        (3, [1, 2], [1, -1], "node 0 has parent 1"),
        (3, [1, 2], [-1, 1], "node 1 has parent 1"),
        (3, [1, 2], [-1, -2], "node 1 has parent -2"),
        (4, [1, 2, 1], [-1, 0, -1], "node -1 has two children with token 1"),
        (4, [1, 2, 2], [-1, 0, 0], "node 0 has two children with token 2"),
    ],
)
def test_what_is_no_tree_is_refused(draws: int, drafts: list[int], parents: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        verify_tree(token_ids([1] * draws), token_ids(drafts), token_ids(parents))


def test_parents_are_whole_numbers_in_one_row() -> None:
    with pytest.raises(ValueError, match="float32"):
        verify_tree(token_ids([1, 2]), token_ids([1]), np.array([-1], dtype=np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        verify_tree(token_ids([1, 2]), token_ids([1]), token_ids([-1]).reshape(1, 1))
