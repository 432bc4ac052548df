"""What a synthetic worker holds of its sequences: tokens instead of KV, with a real worker's accounts and checks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workers.emulated.language import SyntheticLanguage, sequence_key
from workers.engine.block_pool import BlockPool, blocks_for
from workers.errors import OutOfBlocksError
from workers.messages import DraftAheadItem, ProposeItem, SamplingParams, VerifyItem, WorkerStats


@dataclass(frozen=True, slots=True)
class SyntheticSize:
    """How much a synthetic worker can hold: tokens per sequence, and KV blocks of `block_tokens` tokens."""

    context_length: int = 4_096
    block_tokens: int = 16
    total_blocks: int = 65_536


@dataclass(slots=True)
class HeldSequence:
    """A sequence: how it samples, the tokens that a real worker's KV would hold, and their blocks."""

    sampling: SamplingParams
    key: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a step reads of one sequence: `tokens` from `first_position` on, the first `committed` of them commits."""

    item: ProposeItem | DraftAheadItem | VerifyItem
    tokens: tuple[int, ...]
    committed: int

    @property
    def end(self) -> int:
        """How many tokens the worker holds after the step."""
        return self.item.first_position + len(self.tokens)


class SyntheticSequences:
    """Follows sequences as `workers.engine.followed` and the engine do, and wants commits to be the right tokens."""

    def __init__(self, language: SyntheticLanguage, size: SyntheticSize) -> None:
        self.size = size
        self._language = language
        self._pool = BlockPool(size.total_blocks)
        self._held: dict[int, HeldSequence] = {}

    def __getitem__(self, sequence_id: int) -> HeldSequence:
        return self._held[sequence_id]

    def accept(self, items: Iterable[ProposeItem | DraftAheadItem | VerifyItem]) -> set[int]:
        """Start the sequences that the items start; return the ids of those that can be read.

        The others are lost: unknown here, or shorter than the item's first position. Raises ValueError for a step that
        no router may send.
        """
        known: set[int] = set()
        for item in items:
            _require(item.sequence_id not in known, item, "appears twice in one step")
            _require(item.first_position >= 0, item, f"first_position is {item.first_position}")
            _require(len(item.committed) > 0, item, "no new tokens")
            if not isinstance(item, DraftAheadItem):
                self._start(item)
            held = self._held.get(item.sequence_id)
            if held is not None and len(held.tokens) >= item.first_position:
                known.add(item.sequence_id)
        return known

    def read(self, readings: Sequence[Reading]) -> None:
        """Cut each sequence back to its item's first position and read the new tokens.

        Raises, with nothing changed, OutOfBlocksError when the pool is short and ValueError for tokens that cannot be.
        """
        for reading in readings:
            self._check(reading)
        wanted = sum(blocks_for(reading.end, self.size.block_tokens) for reading in readings)
        released = sum(len(self._held[reading.item.sequence_id].blocks) for reading in readings)
        if wanted - released > self._pool.free_blocks:
            raise OutOfBlocksError(
                f"the step needs {wanted - released} more KV blocks, {self._pool.free_blocks} are free"
            )
        for reading in readings:
            self.truncate(reading.item.sequence_id, reading.item.first_position)
        for reading in readings:
            held = self._held[reading.item.sequence_id]
            held.tokens += reading.tokens
            held.blocks += self._pool.allocate(blocks_for(reading.end, self.size.block_tokens) - len(held.blocks))

    def truncate(self, sequence_id: int, length: int) -> None:
        """Forget the tokens from position `length` on, and free the blocks behind them."""
        held = self._held[sequence_id]
        if not 0 <= length <= len(held.tokens):
            raise ValueError(f"cannot truncate {len(held.tokens)} tokens to {length}")
        del held.tokens[length:]
        kept = blocks_for(length, self.size.block_tokens)
        self._pool.free(held.blocks[kept:])
        del held.blocks[kept:]

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their blocks; unknown ids are ignored."""
        for sequence_id in list(self._held) if sequence_ids is None else sequence_ids:
            if sequence_id in self._held:
                self._pool.free(self._held.pop(sequence_id).blocks)

    def stats(self) -> WorkerStats:
        """Return the current accounting."""
        return WorkerStats(len(self._held), self._pool.free_blocks, self._pool.total_blocks)

    def _start(self, item: ProposeItem | VerifyItem) -> None:
        starts = item.first_position == 0
        _require((item.sampling is not None) == starts, item, "sampling is set where, and only where, it starts")
        _require((item.prompt_tokens > 0) == starts, item, "prompt_tokens is set where, and only where, it starts")
        if item.sampling is not None:
            self.release((item.sequence_id,))
            key = sequence_key(item.sampling)
            self._held[item.sequence_id] = HeldSequence(item.sampling, key, item.prompt_tokens)

    def _check(self, reading: Reading) -> None:
        """Raise ValueError for ids that are none, too many tokens, or output that was never drawn."""
        item, held = reading.item, self._held[reading.item.sequence_id]
        context = self.size.context_length
        _require(reading.end <= context, item, f"{reading.end} tokens exceed the context {context}")
        in_vocabulary = all(0 <= token < self._language.vocabulary_size for token in reading.tokens)
        _require(in_vocabulary, item, "a token id is not in the vocabulary")
        history = [*held.tokens[: item.first_position], *reading.tokens[: reading.committed]]
        for position in range(max(item.first_position, held.prompt_tokens), len(history)):
            right = self._language.token_at(held.key, history, position)
            _require(history[position] == right, item, f"token {history[position]} at {position} was never drawn")


def _require(holds: bool, item: ProposeItem | DraftAheadItem | VerifyItem, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"sequence {item.sequence_id}: {otherwise}")
