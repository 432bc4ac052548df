"""Packing a step, and cutting it into groups that attend together."""

import numpy as np
import pytest

from workers.engine.groups import group_bounds
from workers.engine.step import PackedStep, StepInput, pack_step
from workers.messages import token_ids


def example() -> PackedStep:
    inputs = [
        StepInput(7, 2, token_ids([10, 11, 12]), 2),
        StepInput(8, 9, token_ids([20]), 1),
        StepInput(9, 0, token_ids([30, 31]), 0),
    ]
    return pack_step(inputs, [[4, 5], [1, 2, 3], [0]])


def test_sequences_are_packed_by_new_tokens_and_rows_keep_the_order_of_inputs() -> None:
    step = example()
    assert step.token_ids.tolist() == [20, 30, 31, 10, 11, 12]
    assert step.positions.tolist() == [9, 0, 1, 2, 3, 4]
    assert step.new_tokens.tolist() == [1, 2, 3]
    assert step.context_lengths.tolist() == [10, 2, 5]
    assert step.block_tables.tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 0]]
    assert step.logit_rows.tolist() == [4, 5, 0]


def test_a_step_survives_its_way_through_one_array() -> None:
    step = example()
    copy = PackedStep.from_array(step.to_array())
    for name in PackedStep.__slots__:
        original, read = getattr(step, name), getattr(copy, name)
        assert original.dtype == read.dtype == np.int32
        assert np.array_equal(original, read)


def test_a_cut_off_step_is_refused() -> None:
    with pytest.raises(ValueError, match="packed step"):
        PackedStep.from_array(example().to_array()[:-1])


def test_a_long_chunk_does_not_pad_its_neighbours() -> None:
    assert group_bounds([1] * 8 + [512], [300] * 8 + [512]) == [(0, 8), (8, 9)]


def test_a_long_context_does_not_pad_its_neighbours() -> None:
    assert group_bounds([1] * 5, [100] * 4 + [8000]) == [(0, 4), (4, 5)]


def test_nearly_equal_sequences_share_a_call() -> None:
    assert group_bounds([4, 4, 5, 5], [90, 300, 280, 310]) == [(0, 4)]
