"""Blocks are never lost, never shared, and always given back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.block_pool import BlockPool
from workers.engine.sequence_cache import SequenceCache
from workers.errors import OutOfBlocksError

TOTAL_BLOCKS = 12
BLOCK_TOKENS = 4
operations = st.lists(
    st.tuples(st.sampled_from(["start", "extend", "truncate", "release"]), st.integers(0, 3), st.integers(0, 60)),
    max_size=60,
)


@settings(max_examples=150)
@given(operations)
def test_free_and_held_blocks_always_add_up_and_all_return_after_release(steps: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(TOTAL_BLOCKS)
    caches = {index: SequenceCache(pool, BLOCK_TOKENS) for index in range(4)}
    for action, index, length in steps:
        cache = caches[index]
        before = (list(cache.blocks), cache.length, pool.free_blocks)
        if action == "extend" and length >= cache.length:
            try:
                cache.extend_to(length)
            except OutOfBlocksError:
                assert (cache.blocks, cache.length, pool.free_blocks) == before
        elif action == "truncate" and length <= cache.length:
            cache.truncate(length)
            assert cache.blocks == before[0][: len(cache.blocks)]
        elif action in ("start", "release"):
            cache.release()
        held = [block for one in caches.values() for block in one.blocks]
        assert len(set(held)) == len(held) == TOTAL_BLOCKS - pool.free_blocks
        assert all(len(one.blocks) == -(-one.length // BLOCK_TOKENS) for one in caches.values())
    for cache in caches.values():
        cache.release()
    assert pool.free_blocks == pool.total_blocks == TOTAL_BLOCKS


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(blocks)


def test_asking_for_too_many_blocks_takes_none() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.free_blocks == 1


@pytest.mark.parametrize("length", [-1, 6])
def test_a_sequence_cannot_be_cut_to_a_length_it_does_not_have(length: int) -> None:
    cache = SequenceCache(BlockPool(2), BLOCK_TOKENS)
    cache.extend_to(5)
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(length)
