"""The packed, paged forward pass computes what the unmodified model computes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine.tiny_models import CONTEXT, FAMILIES, VOCABULARY, TinyModel
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.errors import OutOfBlocksError
from workers.messages import token_ids

TOLERANCE = 1e-4


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return ids


class Reader:
    """Feeds sequences to an engine in chosen pieces and holds every row of logits against the reference."""

    def __init__(self, engine: Engine, model: TinyModel) -> None:
        self.engine = engine
        self.model = model
        self.texts: dict[int, list[int]] = {}

    def start(self, sequence_id: int, text: list[int]) -> None:
        self.engine.start(sequence_id)
        self.texts[sequence_id] = text

    def step(self, *pieces: tuple[int, int, int]) -> None:
        """Read (sequence, first position, tokens) pieces in one step; every second sequence asks for all its rows."""
        inputs = []
        for sequence_id, first, count in pieces:
            piece = token_ids(self.texts[sequence_id][first : first + count])
            inputs.append(StepInput(sequence_id, first, piece, count if sequence_id % 2 else 1))
        logits = self.engine.forward(inputs).cpu()
        expected = torch.cat(
            [
                self.model.logits(self.texts[item.sequence_id][: item.first_position + len(item.token_ids)])[
                    -item.logit_rows :
                ]
                for item in inputs
            ]
        )
        assert logits.dtype == torch.float32
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mix_of_prompts_chunks_and_single_tokens_gives_the_models_own_logits(
    family: str, tiny_model: Callable[[str], TinyModel], load_engine: Callable[..., Engine]
) -> None:
    model = tiny_model(family)
    reader = Reader(load_engine(model.folder), model)
    for sequence_id, length in enumerate((70, 40, 100, 33, 21, 45)):
        reader.start(sequence_id, random_ids(length, seed=sequence_id))
    reader.step((0, 0, 25))
    reader.step((1, 0, 17), (0, 25, 1))
    reader.step((2, 0, 60), (0, 26, 5), (1, 17, 1), (3, 0, 30), (4, 0, 4))
    reader.step((3, 30, 1), (2, 60, 37), (1, 18, 5), (0, 31, 5), (4, 4, 4), (5, 0, 3))
    reader.step((0, 36, 1), (1, 23, 1), (2, 97, 1), (3, 31, 1), (4, 8, 1), (5, 3, 1))


def test_sequences_of_equal_length_need_no_mask_and_still_agree(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine]
) -> None:
    reader = Reader(load_engine(), tiny_llama)
    for sequence_id in range(3):
        reader.start(sequence_id, random_ids(30, seed=sequence_id))
    reader.step(*((sequence_id, 0, 20) for sequence_id in range(3)))
    reader.step(*((sequence_id, 20, 1) for sequence_id in range(3)))


def test_rolling_back_and_reading_other_tokens_equals_a_fresh_sequence(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine]
) -> None:
    reader = Reader(load_engine(), tiny_llama)
    text = random_ids(80, seed=1)
    reader.start(1, text)
    reader.step((1, 0, 60))
    reader.texts[1] = text[:41] + random_ids(39, seed=2)
    reader.step((1, 41, 6))
    assert reader.engine.length(1) == 47
    reader.step((1, 47, 1))


def test_a_rollback_copies_no_tensor_and_returns_tail_blocks(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    pool = engine._pool
    addresses = [tensor.data_ptr() for tensor in (*pool.keys, *pool.values)]
    engine.start(1)
    engine.forward([StepInput(1, 0, token_ids(random_ids(60, seed=1)), 1)])
    cached = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    table = list(engine._sequences[1].blocks)
    engine.truncate(1, 20)
    assert engine.length(1) == 20
    assert engine._sequences[1].blocks == table[:2]
    assert engine.free_blocks == engine.total_blocks - 2
    assert [tensor.data_ptr() for tensor in (*pool.keys, *pool.values)] == addresses
    for tensor, before in zip((*pool.keys, *pool.values), cached, strict=True):
        assert torch.equal(tensor, before)


def test_a_step_short_of_blocks_changes_nothing(tiny_llama: TinyModel, load_engine: Callable[..., Engine]) -> None:
    engine = load_engine(max_context_tokens=64, block_tokens=8, kv_cache_gib=64 * 256 / 2**30)
    assert engine.total_blocks == 8
    reader = Reader(engine, tiny_llama)
    reader.start(1, random_ids(64, seed=1))
    reader.start(2, random_ids(64, seed=2))
    reader.step((1, 0, 30), (2, 0, 20))
    with pytest.raises(OutOfBlocksError):
        engine.forward(
            [StepInput(1, 10, token_ids(random_ids(20, seed=3)), 1), StepInput(2, 20, token_ids([5] * 30), 1)]
        )
    assert (engine.length(1), engine.length(2), engine.free_blocks) == (30, 20, 1)
    reader.step((1, 30, 1), (2, 20, 3))


def test_blocks_freed_by_one_rollback_serve_another_sequence_in_the_same_step(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine]
) -> None:
    reader = Reader(load_engine(max_context_tokens=64, block_tokens=8, kv_cache_gib=64 * 256 / 2**30), tiny_llama)
    reader.start(1, random_ids(64, seed=1))
    reader.start(2, random_ids(64, seed=2))
    reader.step((1, 0, 50))
    reader.step((2, 0, 40), (1, 16, 2))
    assert reader.engine.free_blocks == 0


def test_a_failed_pass_claims_no_tokens(load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine()
    engine.start(1)
    engine.forward([StepInput(1, 0, token_ids([1, 2, 3]), 0)])

    def fail(_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "execute", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward([StepInput(1, 2, token_ids(random_ids(40, seed=1)), 1)])
    assert engine.length(1) == 2
    assert engine.free_blocks == engine.total_blocks - 1


def test_releasing_everything_frees_every_block(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    for sequence_id in range(3):
        engine.start(sequence_id)
        engine.forward([StepInput(sequence_id, 0, token_ids(random_ids(40, seed=1)), 0)])
    engine.release([1, 99])
    assert (engine.sequences, engine.length(1)) == (2, None)
    engine.release(None)
    assert (engine.sequences, engine.free_blocks) == (0, engine.total_blocks)


def test_no_logits_are_returned_where_none_are_asked_for(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    engine.start(1)
    assert engine.forward([StepInput(1, 0, token_ids([1, 2]), 0)]).shape == (0, VOCABULARY)
    assert engine.forward([]).shape == (0, VOCABULARY)


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (StepInput(2, 0, token_ids([1]), 1), "unknown"),
        (StepInput(1, 4, token_ids([1]), 1), "3 tokens cached"),
        (StepInput(1, 0, token_ids([]), 0), "no new tokens"),
        (StepInput(1, 0, token_ids([1]), 2), "2 rows of logits"),
        (StepInput(1, 0, token_ids([VOCABULARY]), 1), "token ids"),
        (StepInput(1, 0, token_ids([-1]), 1), "token ids"),
        (StepInput(1, 0, token_ids([1] * (CONTEXT + 1)), 1), "exceed the context"),
    ],
)
def test_an_impossible_input_is_refused_and_changes_nothing(
    step: StepInput, complaint: str, load_engine: Callable[..., Engine]
) -> None:
    engine = load_engine()
    engine.start(1)
    engine.forward([StepInput(1, 0, token_ids([1, 2, 3]), 0)])
    with pytest.raises(ValueError, match=complaint):
        engine.forward([step])
    assert engine.length(1) == 3


def test_a_sequence_may_not_appear_twice_in_a_step(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    engine.start(1)
    with pytest.raises(ValueError, match="twice"):
        engine.forward([StepInput(1, 0, token_ids([1]), 1)] * 2)


def test_long_chunks_repeat_keys_instead_of_stacking_queries(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine]
) -> None:
    reader = Reader(load_engine(), tiny_llama)
    reader.start(1, random_ids(CONTEXT, seed=1))
    reader.step((1, 0, 100))
    reader.step((1, 100, 60))
