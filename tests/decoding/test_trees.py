"""Depths, ancestors and straight runs of trees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.decoding.trees import ancestry, node_depths, proposal_depth, straight_runs
from workers.messages import NO_PROPOSAL, Proposal, token_ids

trees = st.lists(st.integers(0, 99), max_size=12).map(
    lambda choices: token_ids([choice % (node + 1) - 1 for node, choice in enumerate(choices)])
)


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@given(trees)
@settings(max_examples=200)
def test_ancestors_and_depths_are_those_of_the_path(parents: np.ndarray) -> None:
    paths = [path_to(node, parents.tolist()) for node in range(len(parents))]

    assert [np.flatnonzero(row).tolist() for row in ancestry(parents)] == paths
    assert node_depths(parents).tolist() == [len(path) - 1 for path in paths]
    proposal = Proposal(parents, parents=parents)
    assert proposal_depth(proposal) == max((len(path) for path in paths), default=0)


@given(trees)
@settings(max_examples=200)
def test_straight_runs_cover_all_rows_and_each_row_is_the_parent_of_the_next(parents: np.ndarray) -> None:
    runs = straight_runs(parents)

    assert [row for rows in runs for row in rows] == list(range(len(parents) + 1))
    for rows in runs:
        assert all(parents[row - 1] == row - 2 for row in rows[1:])
    assert all(parents[rows[0] - 1] != rows[0] - 2 for rows in runs[1:])


@pytest.mark.parametrize(
    ("parents", "runs"),
    [([], [1]), ([-1, 0, 1], [4]), ([-1, -1, -1], [2, 1, 1]), ([-1, 0, 1, -1, 3, 1], [4, 2, 1])],
)
def test_a_chain_is_one_run(parents: list[int], runs: list[int]) -> None:
    assert [len(rows) for rows in straight_runs(token_ids(parents))] == runs


def test_a_chain_is_as_deep_as_it_is_long() -> None:
    assert proposal_depth(NO_PROPOSAL) == 0
    assert proposal_depth(Proposal(token_ids([4, 4, 4]))) == 3
