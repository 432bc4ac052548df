"""Which blocks of the KV pool are free, who shares the others, and which hold known tokens."""

from collections import OrderedDict
from collections.abc import Sequence

from workers.errors import OutOfBlocksError


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return how many blocks of `block_tokens` slots hold `tokens` tokens."""
    return -(-tokens // block_tokens)


# Block tables of unequal length are padded with this one. It belongs to nobody and stays zero: masked slots are read
# all the same, and NaN in another sequence's block would spoil the row.
PADDING_BLOCK = 0


class BlockPool:
    """Hands out block numbers from 1 to `total_blocks`, and counts who holds them; it knows nothing of tensors.

    A block may be published under the digest of what it holds, and is found by it from then on, also when nobody
    holds it any more: until its room is needed, which takes the block first that has been free for longest.
    """

    def __init__(self, total_blocks: int) -> None:
        self._total_blocks = total_blocks
        self._free = list(range(total_blocks, PADDING_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and held by nobody, longest free first
        self._references = [0] * (total_blocks + 1)
        self._digests: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}

    @property
    def total_blocks(self) -> int:
        """How many blocks there are."""
        return self._total_blocks

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds, published ones included."""
        return len(self._free) + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """How many blocks are published, whether held or not."""
        return len(self._published)

    def references(self, block: int) -> int:
        """Return how many hold `block`."""
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """Whether a change of `block` would be seen by its only holder alone."""
        return self._references[block] == 1 and block not in self._digests

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises OutOfBlocksError, with nothing taken, when fewer are free.
        """
        if count > self.free_blocks:
            raise OutOfBlocksError(
                f"{count} KV blocks are needed and {self.free_blocks} of {self.total_blocks} are free"
            )
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give `blocks` back; the last one given is the first to be handed out again, and published ones the last.

        Raises ValueError for a block that is not in use, which is a mistake of the caller.
        """
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"KV block {block} is not in use")
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._digests:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def share(self, digest: bytes) -> int | None:
        """Take the block that is published under `digest`, beside those who hold it already; None if there is none."""
        block = self._published.get(digest)
        if block is not None:
            self._references[block] += 1
            self._idle.pop(block, None)
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """Take `blocks`, which are in use, beside those who hold them already."""
        for block in blocks:
            assert self._references[block]
            self._references[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Let a block that is in use be found by `digest`. Where another one is already, that one stays."""
        if digest not in self._published and block not in self._digests:
            self._published[digest] = block
            self._digests[block] = digest

    def withdraw(self, block: int) -> None:
        """Let nobody find `block` any more; those who hold it keep it."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._published[digest]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._published[self._digests.pop(block)]
        return block
