"""The cached part of one sequence: its block table and its length."""

import numpy as np

from workers.engine.block_pool import BlockPool, blocks_for
from workers.engine.step import Int32Array


class SequenceCache:
    """Maps positions 0 to `length` - 1 of one sequence to slots of the KV pool.

    Position p lives in slot `blocks[p // block_tokens] * block_tokens + p % block_tokens`.
    """

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self.blocks: list[int] = []
        self.length = 0

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
        self._pool.free(tail[::-1])
        self.length = length

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
