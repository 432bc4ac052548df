"""Blocks that are shared, copied, recycled and found again always hold what their sequences have read."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.fakes.chain_engine import POISON, ChainEngine, next_entry
from workers.engine.block_pool import PADDING_BLOCK, BlockPool
from workers.engine.prefix_digests import next_digest, root_digest
from workers.engine.sequence_cache import SequenceCache
from workers.engine.step import AcceptedPath, StepInput
from workers.errors import OutOfBlocksError
from workers.messages import token_ids

TOTAL_BLOCKS = 24
SEQUENCES = 6


def entries_of(tokens: list[int]) -> list[float]:
    entries = [0.0]
    for token in tokens:
        entries.append(next_entry(entries[-1], token))
    return entries[1:]


@dataclass
class World:
    """An engine under random operations, beside the plain lists of tokens that its sequences should hold."""

    engine: ChainEngine
    random: random.Random
    tokens: dict[int, list[int]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)

    def operate(self) -> None:
        actions = ["start", "fork", "read", "read", "read", "publish", "publish", "withdraw", "release"]
        action = self.random.choices(actions, weights=[4, 3, 4, 4, 4, 5, 5, 1, 2])[0]
        sequence_id = self.random.randrange(SEQUENCES)
        if action in ("start", "fork") or not self.tokens:
            other = self.random.choice([*self.tokens.values(), []]) if action == "fork" else self._prompt()
            self.start(sequence_id, [*other[: self.random.randint(0, len(other))], *self._new(4)])
        elif action == "read":
            chosen = self.random.sample(sorted(self.tokens), min(self.random.randint(1, 3), len(self.tokens)))
            self.read([self._input(one) for one in chosen])
        elif sequence_id in self.tokens:
            getattr(self, action)(sequence_id)
        self.check()

    def start(self, sequence_id: int, known: list[int]) -> None:
        salt = self.random.choice([None, None, "other"])
        cached = self.engine.start(sequence_id, token_ids(known), salt)
        assert cached < len(known)
        assert cached % self.engine.block_tokens == 0
        self.tokens[sequence_id] = known[:cached]
        self.done["hit"] += cached > 0
        self.read([StepInput(sequence_id, cached, token_ids(known[cached:]), logit_rows=1)])

    def read(self, inputs: list[StepInput]) -> None:
        before = {one: list(tokens) for one, tokens in self.tokens.items()}, self.engine.free_blocks
        try:
            rows = self.engine.forward(inputs)
        except OutOfBlocksError:
            assert before == (self.tokens, self.engine.free_blocks)
            self.done["out of blocks"] += 1
            self.release(self.random.choice(sorted(self.tokens)))
            return
        for item, row in zip(inputs, rows.flatten().tolist(), strict=True):
            tokens = self.tokens[item.sequence_id]
            self.done["roll back"] += item.first_position < len(tokens)
            del tokens[item.first_position :]
            if item.parents is None:
                tokens += item.token_ids.tolist()
                np.testing.assert_equal(row, entries_of(tokens)[-1])
            else:
                self._keep_path(item)

    def publish(self, sequence_id: int) -> None:
        sound = self.tokens[sequence_id]
        sound = sound[: sound.index(POISON)] if POISON in sound else sound
        self.engine.publish(sequence_id, token_ids(sound[: self.random.choice([len(sound), len(sound) // 2])]))

    def withdraw(self, sequence_id: int) -> None:
        self.engine.withdraw(sequence_id)

    def release(self, sequence_id: int) -> None:
        self.engine.release((sequence_id,))
        del self.tokens[sequence_id]

    def check(self) -> None:
        pool, size = self.engine._blocks, self.engine.block_tokens
        held: Counter[int] = Counter()
        for sequence_id, tokens in self.tokens.items():
            blocks = self.engine._sequences[sequence_id].blocks
            assert len(blocks) == len(set(blocks)) == -(-len(tokens) // size)
            held.update(blocks)
            found = self.engine.entries[torch.tensor(self.engine.slots(sequence_id), dtype=torch.int64)]
            np.testing.assert_array_equal(found.numpy(), np.array(entries_of(tokens)))
        assert [pool.references(block) for block in range(TOTAL_BLOCKS + 1)] == [
            held[b] for b in range(TOTAL_BLOCKS + 1)
        ]
        assert sorted([*pool._free, *pool._idle, *held]) == list(range(1, TOTAL_BLOCKS + 1))
        assert pool.free_blocks == TOTAL_BLOCKS - len(held)
        assert {digest: block for block, digest in pool._digests.items()} == pool._published
        assert not set(pool._free) & set(pool._digests)
        assert not self.engine.entries[PADDING_BLOCK * size : size].any()
        self.done["shared"] += any(count > 1 for count in held.values())

    def _prompt(self) -> list[int]:
        kind = self.random.randrange(4)
        return [(kind * position * position + position) % POISON for position in range(self.random.randint(1, 30))]

    def _new(self, most: int) -> list[int]:
        return [self.random.choice([1, 2, 3, 4] * 20 + [POISON]) for _ in range(self.random.randint(1, most))]

    def _input(self, sequence_id: int) -> StepInput:
        length = len(self.tokens[sequence_id])
        first = self.random.choice([length, length, length, max(0, length - 1), self.random.randint(0, length)])
        new = self._new(6)
        if POISON in self.tokens[sequence_id]:
            # Rolled back, it would stay in the sequence's own block and spoil what comes next, which is its own affair.
            return StepInput(sequence_id, length, token_ids(new), logit_rows=1)
        if first == 0 or self.random.random() < 0.7:
            return StepInput(sequence_id, first, token_ids(new), logit_rows=1)
        new = [token % POISON for token in new]
        parents = [self.random.randint(-1, node - 1) for node in range(len(new))]
        return StepInput(sequence_id, first, token_ids(new), logit_rows=1, parents=token_ids(parents))

    def _keep_path(self, item: StepInput) -> None:
        assert item.parents is not None
        path: list[int] = []
        while children := [n for n, parent in enumerate(item.parents) if parent == (path[-1] if path else -1)]:
            if self.random.random() < 0.2:
                break
            path.append(self.random.choice(children))
        self.engine.keep_paths([AcceptedPath(item.sequence_id, item.first_position, token_ids(path))])
        self.tokens[item.sequence_id] += item.token_ids[path].tolist()


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 5])
def test_thousands_of_random_operations_neither_lose_nor_mix_up_a_block(block_tokens: int) -> None:
    world = World(ChainEngine(TOTAL_BLOCKS, block_tokens), random.Random(block_tokens))
    for _ in range(2_500):
        world.operate()
    for action in ("hit", "shared", "roll back", "out of blocks"):
        assert world.done[action] > 20, world.done
    assert world.engine.copied_entries > 0
    for sequence_id in list(world.tokens):
        world.release(sequence_id)
    assert world.engine.free_blocks == TOTAL_BLOCKS
    stats = world.engine.stats()
    assert 0 < stats.prefix_cache_hits < stats.prefix_cache_queries
    assert 0 < stats.cached_blocks <= TOTAL_BLOCKS


def read(engine: ChainEngine, sequence_id: int, tokens: list[int], salt: str | None = None) -> int:
    """Start the sequence, read what is not cached, publish it; return what was cached."""
    cached = engine.start(sequence_id, token_ids(tokens), salt)
    engine.forward([StepInput(sequence_id, cached, token_ids(tokens[cached:]), 1)])
    engine.publish(sequence_id, token_ids(tokens))
    return cached


def test_the_longest_prefix_of_whole_blocks_is_found_but_never_the_last_token() -> None:
    engine = ChainEngine(TOTAL_BLOCKS, 4)
    text = [position % 5 for position in range(16)]
    assert read(engine, 1, text) == 0
    engine.release(None)
    assert read(engine, 2, text) == 12
    assert read(engine, 3, [*text, 1]) == 16
    assert read(engine, 4, [*text[:9], 6, 6, 6, 6]) == 8
    assert read(engine, 5, [6, *text[1:]]) == 0
    assert engine.start(6, token_ids([1])) == 0


def test_sequences_of_different_salts_share_nothing() -> None:
    engine = ChainEngine(TOTAL_BLOCKS, 4)
    text = [1] * 9
    assert [read(engine, number, text, salt) for number, salt in enumerate([None, "a", "b", "", "a", None])] == [
        0, 0, 0, 0, 8, 8,
    ]  # fmt: skip


def test_only_published_tokens_are_found() -> None:
    engine = ChainEngine(TOTAL_BLOCKS, 4)
    engine.start(1)
    engine.forward([StepInput(1, 0, token_ids([1] * 12), 1)])
    assert engine.start(2, token_ids([1] * 12)) == 0
    engine.publish(1, token_ids([1] * 7))
    assert engine.start(2, token_ids([1] * 12)) == 4
    engine.publish(1, token_ids([1] * 8))
    assert engine.start(2, token_ids([1] * 12)) == 8


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    engine = ChainEngine(TOTAL_BLOCKS, 4)
    engine.prefix_caching = False
    assert [read(engine, number, [1] * 9) for number in range(3)] == [0, 0, 0]
    assert engine.stats().cached_blocks == engine.stats().prefix_cache_queries == 0


def test_a_roll_back_into_a_shared_block_copies_it_and_into_an_own_one_does_not() -> None:
    engine = ChainEngine(TOTAL_BLOCKS, 4)
    read(engine, 1, [1] * 8)
    assert read(engine, 2, [1] * 9) == 8
    engine.forward([StepInput(2, 7, token_ids([3]), 1)])
    assert engine.copied_entries == 4
    assert engine.entries[engine.slots(1)].tolist() == entries_of([1] * 8)
    assert engine.entries[engine.slots(2)].tolist() == entries_of([1] * 7 + [3])
    engine.forward([StepInput(1, 7, token_ids([4]), 1)])
    assert engine.copied_entries == 4
    # Nobody may find a block by what it does not hold any more.
    assert engine.start(3, token_ids([1] * 9)) == 4


def test_a_step_that_needs_a_block_for_a_copy_is_refused_whole_when_there_is_none() -> None:
    engine = ChainEngine(3, 4)
    read(engine, 1, [1] * 8)
    assert read(engine, 2, [1] * 9) == 8
    with pytest.raises(OutOfBlocksError):
        engine.forward([StepInput(1, 6, token_ids([3]), 1), StepInput(2, 8, token_ids([2]), 1)])
    assert (engine.length(1), engine.length(2)) == (8, 9)
    engine.truncate(2, 6)
    # Both write into the block that both hold: one of them needs a copy, and the other keeps it.
    engine.forward([StepInput(1, 6, token_ids([3]), 1), StepInput(2, 6, token_ids([4]), 1)])
    assert [engine.entries[engine.slots(number)].tolist()[-1] for number in (1, 2)] == [
        entries_of([1] * 6 + [token])[-1] for token in (3, 4)
    ]


def test_a_copy_that_fails_leaves_its_sequence_at_the_start_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ChainEngine(TOTAL_BLOCKS, 4)
    read(engine, 1, [1] * 8)
    read(engine, 2, [1] * 9)

    def fail(moves: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine, "move", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.forward([StepInput(2, 6, token_ids([3]), 1)])
    assert (engine.length(1), engine.length(2)) == (8, 4)
    engine.release(None)
    assert engine.free_blocks == TOTAL_BLOCKS


def test_blocks_are_recycled_from_the_end_of_what_was_used_longest_ago() -> None:
    pool = BlockPool(6)
    caches = []
    for salt in ("old", "new"):
        cache = SequenceCache(pool, 2, salt)
        cache.extend_to(6)
        cache.publish(token_ids([1] * 6))
        caches.append(cache)
    for cache in caches:
        cache.release()
    assert (pool.free_blocks, pool.cached_blocks) == (6, 6)
    taken = pool.allocate(2)
    assert (pool.free_blocks, pool.cached_blocks) == (4, 4)
    found = [SequenceCache(pool, 2, salt).adopt(token_ids([1] * 9)) for salt in ("old", "new")]
    assert found == [2, 6]
    pool.free(taken)


def test_a_withdrawn_block_is_found_no_more_but_stays_with_its_holders() -> None:
    pool = BlockPool(4)
    first, second = SequenceCache(pool, 2), SequenceCache(pool, 2)
    first.extend_to(4)
    first.publish(token_ids([1] * 4))
    assert second.adopt(token_ids([1] * 5)) == 4
    first.withdraw()
    assert SequenceCache(pool, 2).adopt(token_ids([1] * 5)) == 0
    first.release()
    assert pool.free_blocks == 2
    second.release()
    assert (pool.free_blocks, pool.cached_blocks) == (4, 0)


def test_a_digest_depends_on_every_token_before_it_and_never_changes() -> None:
    digests = {
        next_digest(next_digest(root_digest(salt), token_ids(first)), token_ids(second))
        for salt in (None, "", "a")
        for first in ([1, 2], [2, 1], [1, 2, 3])
        for second in ([1, 2], [258, 2], [1, 513])
    }
    assert len(digests) == 27
    assert next_digest(root_digest(None), token_ids([1, 2])).hex()[:16] == "13c54f6469c6a6fe"
