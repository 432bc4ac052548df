"""The cached part of one sequence: its block table, its length, and what it shares with others."""

import numpy as np

from workers.engine.block_pool import BlockPool, blocks_for
from workers.engine.prefix_digests import next_digest, root_digest
from workers.engine.step import Int32Array
from workers.messages import TokenIds


class SequenceCache:
    """Maps positions 0 to `length` - 1 of one sequence to slots of the KV pool.

    Position p lives in slot `blocks[p // block_tokens] * block_tokens + p % block_tokens`. Full blocks may be shared
    with sequences that begin alike and have the same `salt`.
    """

    def __init__(self, pool: BlockPool, block_tokens: int, salt: str | None = None) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self.blocks: list[int] = []
        self.length = 0
        self._digests = [root_digest(salt)]  # then those of the first blocks, as far as they were published or found

    @property
    def writes_into(self) -> int | None:
        """The block that holds the last token and has room for another; None if there is none."""
        return self.blocks[-1] if self.length % self._block_tokens else None

    def adopt(self, tokens: TokenIds) -> int:
        """Begin with the published blocks that hold the longest prefix of `tokens` int32 [n], but never all of them.

        Return how many tokens are cached now. The sequence was empty.
        """
        assert not self.blocks
        for block_end in range(self._block_tokens, len(tokens), self._block_tokens):
            digest = next_digest(self._digests[-1], tokens[block_end - self._block_tokens : block_end])
            block = self._pool.share(digest)
            if block is None:
                break
            self.blocks.append(block)
            self._digests.append(digest)
            self.length = block_end
        return self.length

    def fork(self, length: int) -> "SequenceCache":
        """Return another sequence with the same first `length` tokens, which takes no block.

        Raises ValueError when fewer are cached.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot fork {self.length} cached tokens at {length}")
        fork = SequenceCache(self._pool, self._block_tokens)
        fork.blocks, fork.length = self.blocks[: blocks_for(length, self._block_tokens)], length
        fork._digests = self._digests[: 1 + length // self._block_tokens]
        self._pool.hold(fork.blocks)
        return fork

    def publish(self, tokens: TokenIds) -> None:
        """Let others begin with the full blocks among the first n tokens; these are `tokens` int32 [n], n <= length."""
        for index in range(len(self._digests) - 1, len(tokens) // self._block_tokens):
            start = index * self._block_tokens
            self._digests.append(next_digest(self._digests[-1], tokens[start : start + self._block_tokens]))
            self._pool.publish(self.blocks[index], self._digests[-1])

    def withdraw(self) -> None:
        """Let nobody begin with any of the blocks any more."""
        for block in self.blocks:
            self._pool.withdraw(block)

    def own_tail(self) -> tuple[int, int] | None:
        """See to it that the next token can be written without others seeing it.

        If that takes another block, it is in place already, and the numbers of the old one and the new one are
        returned: the content has yet to be copied. Raises OutOfBlocksError, with nothing changed, if there is none.
        """
        block = self.writes_into
        if block is None or self._pool.is_writable(block):
            return None
        if self._pool.references(block) == 1:
            self._pool.withdraw(block)
            return None
        [self.blocks[-1]] = self._pool.allocate(1)
        self._pool.free([block])
        return block, self.blocks[-1]

    def extend_to(self, length: int) -> None:
        """Make room for the first `length` tokens.

        Raises OutOfBlocksError, with nothing changed, when the pool is short, and ValueError for a shorter length.
        """
        if length < self.length:
            raise ValueError(f"cannot extend {self.length} cached tokens to {length}")
        missing = blocks_for(length, self._block_tokens) - len(self.blocks)
        self.blocks.extend(self._pool.allocate(missing))
        self.length = length

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on. No tensor is touched: tail blocks go back to the pool.

        Raises ValueError when fewer tokens are cached.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} cached tokens to {length}")
        kept = blocks_for(length, self._block_tokens)
        tail = self.blocks[kept:]
        del self.blocks[kept:]
        # The last block first, so that it is the first to go: without those before it, it cannot be found.
        self._pool.free(tail[::-1])
        self.length = length
        del self._digests[1 + length // self._block_tokens :]

    def moves(self, first: int, path: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Return from which slots to which, int32 [n] each, to copy for `path` to follow each other from `first` on.

        `path` int32 [a] are ascending offsets from `first`; those that are in place already need no copy. Raises
        ValueError when the path is not that or is not cached.
        """
        end = first + (int(path[-1]) + 1 if len(path) else 0)
        if bool((np.diff(path, prepend=-1) <= 0).any()) or not 0 <= first <= end <= self.length:
            raise ValueError(f"cannot keep offsets {path.tolist()} from {first} on of {self.length} cached tokens")
        path, targets = path.astype(np.int32, copy=False), np.arange(len(path), dtype=np.int32)
        displaced = path != targets
        return self._slots(first + path[displaced]), self._slots(first + targets[displaced])

    def _slots(self, places: Int32Array) -> Int32Array:
        blocks = np.array(self.blocks, dtype=np.int32)[places // self._block_tokens]
        return blocks * np.int32(self._block_tokens) + places % np.int32(self._block_tokens)

    def release(self) -> None:
        """Forget everything."""
        self.truncate(0)
