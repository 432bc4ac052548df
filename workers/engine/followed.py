"""The sequences a worker follows: who they are, how they sample, and whether a message continues them."""

from collections.abc import Iterable

from workers.engine.engine import Engine
from workers.messages import ProposeItem, SamplingParams, VerifyItem, WorkerStats


class FollowedSequences:
    """Keeps sampling parameters beside the engine's KV cache, both keyed by sequence id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sampling: dict[int, SamplingParams] = {}

    def accept(self, item: ProposeItem | VerifyItem) -> bool:
        """Start the sequence if the item says so; return False if it continues one that is not known here."""
        if item.sampling is not None:
            self._engine.start(item.sequence_id)
            self._sampling[item.sequence_id] = item.sampling
            return True
        length = self._engine.length(item.sequence_id)
        return length is not None and length >= item.first_position

    def sampling(self, sequence_id: int) -> SamplingParams:
        """Return the parameters that the sequence was started with."""
        return self._sampling[sequence_id]

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their KV blocks."""
        if sequence_ids is None:
            self._engine.release(None)
            self._sampling.clear()
            return
        released = tuple(sequence_ids)
        self._engine.release(released)
        for sequence_id in released:
            self._sampling.pop(sequence_id, None)

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        return WorkerStats(self._engine.sequences, self._engine.free_blocks, self._engine.total_blocks)
