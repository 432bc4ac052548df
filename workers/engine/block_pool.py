"""Which blocks of the KV pool are free."""

from collections.abc import Sequence

from workers.errors import OutOfBlocksError


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return how many blocks of `block_tokens` slots hold `tokens` tokens."""
    return -(-tokens // block_tokens)


# Block tables of unequal length are padded with this one. It belongs to nobody and stays zero: masked slots are read
# all the same, and NaN in another sequence's block would spoil the row.
PADDING_BLOCK = 0


class BlockPool:
    """Hands out block numbers from 1 to `total_blocks`; it knows nothing of tensors."""

    def __init__(self, total_blocks: int) -> None:
        self._total_blocks = total_blocks
        self._free = list(range(total_blocks, PADDING_BLOCK, -1))
        self._in_use = bytearray(total_blocks + 1)

    @property
    def total_blocks(self) -> int:
        """How many blocks there are."""
        return self._total_blocks

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises OutOfBlocksError, with nothing taken, when fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} KV blocks are needed and {len(self._free)} of {self.total_blocks} are free"
            )
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._in_use[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give `blocks` back; the last one given is the first to be handed out again.

        Raises ValueError for a block that is not in use, which is a mistake of the caller.
        """
        for block in blocks:
            if not self._in_use[block]:
                raise ValueError(f"KV block {block} is not in use")
            self._in_use[block] = 0
            self._free.append(block)
