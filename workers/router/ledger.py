"""How many KV blocks of a worker are promised to which sequence, so that it never runs out in the middle of a step."""

from dataclasses import dataclass, field

HEADROOM_BLOCKS = 2
"""By so many blocks every sequence of a worker must be able to grow, the new one too, before a new one is taken."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The blocks that a sequence may occupy now, and the most that it can ever need."""

    blocks: int
    most_blocks: int

    @property
    def headroom(self) -> int:
        """How far the sequence may well grow soon."""
        return max(0, min(HEADROOM_BLOCKS, self.most_blocks - self.blocks))


@dataclass(slots=True)
class BlockLedger:
    """Promises by sequence id.

    A promise grows with its sequence and never shrinks: what a step has occupied for rejected drafts, a worker may hold
    until its next step. The surplus is less than the drafts of one round.
    """

    total_blocks: int
    block_tokens: int
    reserved: dict[int, Promise] = field(default_factory=dict)
    _promised: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

    @property
    def free_blocks(self) -> int:
        """Blocks not promised to anybody."""
        return self.total_blocks - self._promised

    def could_hold(self, most_tokens: int) -> bool:
        """Whether a sequence that grows to `most_tokens` tokens would fit if it had the worker to itself."""
        return self.blocks_for(most_tokens) <= self.total_blocks

    def admit(self, sequence_id: int, tokens: int, most_tokens: int) -> bool:
        """Promise blocks for the `tokens` tokens of a new sequence that grows to `most_tokens` at most.

        False, and nothing promised, if they are not free, or if sequences would soon stand in each other's way:
        afterwards each must find room to grow by `HEADROOM_BLOCKS` blocks, or to its end.
        """
        promise = Promise(self.blocks_for(tokens), self.blocks_for(most_tokens))
        headroom = promise.headroom + sum(other.headroom for other in self.reserved.values())
        if promise.blocks + headroom > self.free_blocks:
            return False
        self._set(sequence_id, promise)
        return True

    def extend(self, sequence_id: int, tokens: int, drafts: int) -> int | None:
        """Promise a known sequence blocks for `tokens` tokens and as many of `drafts` more as there is room for.

        Returns how many drafts that are, or None, with nothing changed, if not even the tokens fit.
        """
        promise = self.reserved[sequence_id]
        room = (promise.blocks + self.free_blocks) * self.block_tokens
        if tokens > room:
            return None
        granted = min(drafts, room - tokens)
        blocks = max(promise.blocks, self.blocks_for(tokens + granted))
        self._set(sequence_id, Promise(blocks, promise.most_blocks))
        return granted

    def release(self, sequence_id: int) -> None:
        """Take the promise back, if there is one."""
        promise = self.reserved.pop(sequence_id, None)
        if promise is not None:
            self._promised -= promise.blocks

    def _set(self, sequence_id: int, promise: Promise) -> None:
        self.release(sequence_id)
        self.reserved[sequence_id] = promise
        self._promised += promise.blocks
