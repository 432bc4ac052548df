"""The cached part of one sequence: its block table and its length."""

from workers.engine.block_pool import BlockPool, blocks_for


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

    def release(self) -> None:
        """Forget everything."""
        self.truncate(0)
