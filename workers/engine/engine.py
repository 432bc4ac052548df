"""The engine: sequences in, logits out, over a paged KV pool."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch

from workers.decoding.trees import check_parents
from workers.engine.block_pool import PADDING_BLOCK, BlockPool, blocks_for
from workers.engine.config import EngineConfig
from workers.engine.groups import prepare_step
from workers.engine.kv_pool import KVPool, affordable_blocks
from workers.engine.loading import LoadedModel, load_model, resolve_device
from workers.engine.sequence_cache import SequenceCache
from workers.engine.step import AcceptedPath, KVMoves, PackedStep, StepInput, pack_step
from workers.engine.tensor_parallel import (
    RankGroup,
    TensorParallelRank,
    check_tensor_parallel,
    group_broken,
    join,
)
from workers.errors import ConfigurationError, OutOfBlocksError
from workers.messages import TokenIds, WorkerStats, token_ids

logger = logging.getLogger(__name__)


class Engine:
    """Runs one model over many sequences, whose keys and values it caches.

    Not safe to call from several threads. In a tensor-parallel group rank 0 is called, and the others `follow`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        total_blocks: int,
        group: RankGroup | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.group = group
        self.prefix_caching = prefix_caching
        self._loaded = loaded
        self._pool = pool
        self._blocks = BlockPool(total_blocks)
        self._sequences: dict[int, SequenceCache] = {}
        self._prefix_queries = self._prefix_hits = 0  # tokens looked up and found
        # A mask of four dimensions passes through transformers unread, and stops it from building one.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=loaded.device)

    @classmethod
    def load(cls, config: EngineConfig, tensor_parallel: TensorParallelRank | None = None) -> "Engine":
        """Load the model and allocate the KV pool; with `tensor_parallel`, as one rank of a group.

        Raises ConfigurationError when the model is missing, does not fit, or cannot run here, and LinkClosedError when
        another rank of the group failed to load.
        """
        _check_ranks(config, tensor_parallel)
        group = None if tensor_parallel is None else join(tensor_parallel, resolve_device(config.device))
        try:
            loaded = load_model(config, 0 if tensor_parallel is None else tensor_parallel.rank)
            shape = loaded.kv_shape
            total_blocks = affordable_blocks(shape, config.kv_cache_gib, config.block_tokens, loaded.context_length)
            pool = KVPool.create(shape, total_blocks, config.block_tokens, loaded.device)
            engine = cls(loaded, pool, total_blocks, group, config.prefix_caching)
            engine._try_out(config.model)
        except BaseException:
            if group is not None:
                group.close()
            raise
        if group is not None:
            group.open()
        logger.info(
            "%s on %s: %d blocks of %d tokens, context %d",
            config.model,
            loaded.device,
            total_blocks,
            config.block_tokens,
            loaded.context_length,
        )
        return engine

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits: the tokenizer's ids, without the padding of the embedding."""
        return self._loaded.vocabulary_size

    @property
    def context_length(self) -> int:
        """Most tokens a sequence may have."""
        return self._loaded.context_length

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return self._pool.block_tokens

    @property
    def total_blocks(self) -> int:
        """KV blocks of this engine."""
        return self._blocks.total_blocks

    @property
    def free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return self._blocks.free_blocks

    @property
    def sequences(self) -> int:
        """How many sequences are known, empty ones included, forks not."""
        return sum(sequence_id >= 0 for sequence_id in self._sequences)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._loaded.device

    @property
    def model(self) -> torch.nn.Module:
        """The model that runs, for those who want to look at its weights."""
        return self._loaded.model

    def tokenizer_json(self) -> str | None:
        """Return the content of the model's tokenizer.json, or None when it has none."""
        path = self._loaded.tokenizer_file
        return None if path is None else path.read_text(encoding="utf-8")

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        return WorkerStats(
            self.sequences,
            self.free_blocks,
            self.total_blocks,
            self._blocks.cached_blocks,
            self._prefix_queries,
            self._prefix_hits,
        )

    def start(self, sequence_id: int, known: TokenIds | None = None, salt: str | None = None) -> int:
        """Make the sequence known; return how many tokens of it are cached already.

        It is empty without `known`, and begins otherwise with the longest prefix of `known` int32 [n], but never all of
        it, that was published with the same `salt`. Whole blocks only.
        """
        self.release((sequence_id,))
        cache = self._sequences[sequence_id] = SequenceCache(self._blocks, self.block_tokens, salt)
        if known is None or not self.prefix_caching:
            return 0
        self._prefix_queries += len(known)
        self._prefix_hits += cache.adopt(known)
        return cache.length

    def fork(self, sequence_id: int, fork_id: int, length: int) -> None:
        """Make another sequence known that begins with the first `length` tokens of this one, and shares their KV.

        `fork_id` is negative, unlike those of sequences that anybody else knows of, so that it counts as none. Raises
        ValueError when the sequence is unknown or shorter, or `fork_id` is taken.
        """
        if fork_id >= 0 or fork_id in self._sequences:
            raise ValueError(f"{fork_id} cannot be the id of a fork")
        self._sequences[fork_id] = self._known(sequence_id).fork(length)

    def adopt(self, sequence_id: int, fork_id: int) -> None:
        """Put a fork in the place of the sequence, which is released. Raises ValueError when either is unknown."""
        self._known(sequence_id), self._known(fork_id)
        self.release((sequence_id,))
        self._sequences[sequence_id] = self._sequences.pop(fork_id)

    def publish(self, sequence_id: int, tokens: TokenIds) -> None:
        """Let later sequences begin with the KV of `tokens` int32 [n], the first n of this sequence, n <= its length.

        Their KV must be sound: what is not finite here would spoil every sequence that begins alike.
        """
        if self.prefix_caching:
            self._known(sequence_id).publish(tokens)

    def withdraw(self, sequence_id: int) -> None:
        """Let no later sequence begin with KV that this sequence holds, wherever it came from."""
        self._known(sequence_id).withdraw()

    def length(self, sequence_id: int) -> int | None:
        """Return how many tokens of the sequence are cached, or None when it is unknown."""
        cache = self._sequences.get(sequence_id)
        return None if cache is None else cache.length

    def truncate(self, sequence_id: int, length: int) -> None:
        """Forget the tokens from position `length` on, which copies no tensor.

        Raises ValueError when the sequence is unknown or shorter.
        """
        self._known(sequence_id).truncate(length)

    def keep_paths(self, paths: Sequence[AcceptedPath]) -> None:
        """Make each path the end of its sequence, at the positions its nodes have, and forget the rest of its tree.

        The sequences were just read as trees. KV entries are copied, on all ranks alike, unless they are in place.

        Raises ValueError, with nothing changed, when a path is not within what its sequence has cached, and
        LinkClosedError when the tensor-parallel group is broken; then the sequences end where their trees began.
        """
        caches = [self._known(path.sequence_id) for path in paths]
        moved = [cache.moves(path.first_position, path.nodes) for path, cache in zip(paths, caches, strict=True)]
        try:
            if any(sources.size for sources, _ in moved):
                sources, targets = (np.concatenate(slots) for slots in zip(*moved, strict=True))
                self._move_everywhere(KVMoves(sources, targets))
        except BaseException:
            for path, cache in zip(paths, caches, strict=True):
                cache.truncate(path.first_position)
            raise
        for path, cache in zip(paths, caches, strict=True):
            cache.truncate(path.first_position + len(path.nodes))

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their blocks; unknown ids are ignored."""
        for sequence_id in list(self._sequences) if sequence_ids is None else sequence_ids:
            cache = self._sequences.pop(sequence_id, None)
            if cache is not None:
                cache.release()

    def forward(self, inputs: Sequence[StepInput]) -> torch.Tensor:
        """Read the new tokens of all `inputs` in one pass and return the logits asked for.

        Each sequence is first cut back to its `first_position`, which is the whole of a rollback; only where that is
        within a block that another sequence holds, too, the block is copied.

        Returns float32 [sum of logit_rows, vocabulary_size] on the engine's device, rows in the order of inputs, then
        positions. It is an inference tensor: use it out of place.

        Raises OutOfBlocksError, with nothing changed for any sequence, when the pool is short; ValueError, likewise,
        for an input that cannot be; LinkClosedError when the tensor-parallel group is broken. When the pass itself
        fails, every sequence ends at its `first_position`, or at the block's start where a copy failed.
        """
        if self.group is not None and self.group.rank.rank != 0:
            raise ValueError("forward is called on rank 0 only")
        if not inputs:
            return torch.empty((0, self.vocabulary_size), device=self.device)
        caches = self._check(inputs)
        for item, cache in zip(inputs, caches, strict=True):
            cache.truncate(item.first_position)
        try:
            self._own_tails(caches)
            for item, cache in zip(inputs, caches, strict=True):
                cache.extend_to(item.first_position + len(item.token_ids))
            return self._run(pack_step(inputs, [cache.blocks for cache in caches]))
        except BaseException:
            for item, cache in zip(inputs, caches, strict=True):
                cache.truncate(min(item.first_position, cache.length))
            raise

    def execute(self, step: PackedStep) -> torch.Tensor:
        """Run one packed step on this rank and return the logits, float32 [R, vocabulary_size].

        It touches no block accounting: the step says where everything is.
        """
        with torch.inference_mode():
            metadata = prepare_step(step, self._pool, self.device)
            output = self._loaded.model(
                input_ids=metadata.token_ids,
                position_ids=metadata.position_ids,
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=metadata.logit_rows,
                step=metadata,
            )
            return cast(torch.Tensor, output.logits[0, :, : self.vocabulary_size].float())

    def move(self, moves: KVMoves) -> None:
        """Copy entries of this rank's KV pool."""
        slots = torch.from_numpy(np.stack([moves.sources, moves.targets])).to(self.device, torch.int64)
        self._pool.move_(slots[0], slots[1])

    def close(self) -> None:
        """Leave the tensor-parallel group, if any; followers stop. The engine is not used afterwards."""
        if self.group is not None:
            self.group.close()

    def _run(self, step: PackedStep) -> torch.Tensor:
        if self.group is None:
            return self.execute(step)
        with self.group.lock:
            self.group.send_step(step)
            try:
                return self.execute(step)
            except RuntimeError as error:
                raise group_broken(error) from error

    def _move_everywhere(self, moves: KVMoves) -> None:
        if self.group is None:
            self.move(moves)
            return
        with self.group.lock:
            self.group.send_moves(moves)
            try:
                self.move(moves)
            except RuntimeError as error:
                raise group_broken(error) from error

    def _own_tails(self, caches: Sequence[SequenceCache]) -> None:
        """Give each sequence a last block of its own, if it ends within one; whole blocks are copied, all at once."""
        copied = [(cache, blocks) for cache in caches if (blocks := cache.own_tail()) is not None]
        if not copied:
            return
        # [2, copies, block_tokens]: the old blocks' slots, and the new ones'.
        first_slots = np.array([blocks for _, blocks in copied], dtype=np.int32).T * self.block_tokens
        slots = first_slots[:, :, None] + np.arange(self.block_tokens, dtype=np.int32)
        try:
            self._move_everywhere(KVMoves(*slots.astype(np.int32).reshape(2, -1)))
        except BaseException:
            for cache, _ in copied:
                cache.truncate(cache.length // self.block_tokens * self.block_tokens)
            raise

    def _known(self, sequence_id: int) -> SequenceCache:
        cache = self._sequences.get(sequence_id)
        if cache is None:
            raise ValueError(f"sequence {sequence_id} is unknown")
        return cache

    def _check(self, inputs: Sequence[StepInput]) -> list[SequenceCache]:
        """Return the caches of `inputs` in order, or raise as `forward` says."""
        caches = [self._known(item.sequence_id) for item in inputs]
        if len({item.sequence_id for item in inputs}) < len(inputs):
            raise ValueError("a sequence appears twice in one step")
        for item, cache in zip(inputs, caches, strict=True):
            self._check_input(item, cache)
        self._check_room(inputs, caches)
        return caches

    def _check_room(self, inputs: Sequence[StepInput], caches: Sequence[SequenceCache]) -> None:
        """Count as the step will: sequences are cut back, then last blocks that others hold copied, then more taken."""
        dropped: Counter[int] = Counter()
        written: Counter[int] = Counter()
        blocks_wanted = 0
        for item, cache in zip(inputs, caches, strict=True):
            kept = blocks_for(item.first_position, self.block_tokens)
            dropped.update(cache.blocks[kept:])
            if item.first_position % self.block_tokens:
                written[cache.blocks[kept - 1]] += 1
            blocks_wanted += blocks_for(item.first_position + len(item.token_ids), self.block_tokens) - kept
        references = self._blocks.references
        # Of those that write into a block and nobody else holds, the last one keeps it.
        blocks_wanted += sum(min(count, references(block) - dropped[block] - 1) for block, count in written.items())
        free = self.free_blocks + sum(references(block) == count for block, count in dropped.items())
        if blocks_wanted > free:
            raise OutOfBlocksError(f"the step needs {blocks_wanted} KV blocks and {free} are free")

    def _check_input(self, item: StepInput, cache: SequenceCache) -> None:
        count = len(item.token_ids)
        where = f"sequence {item.sequence_id}"
        if count < 1:
            raise ValueError(f"{where}: no new tokens")
        if not 0 <= item.logit_rows <= count:
            raise ValueError(f"{where}: {item.logit_rows} rows of logits from {count} tokens")
        if not 0 <= item.first_position <= cache.length:
            raise ValueError(f"{where}: first_position {item.first_position} with {cache.length} tokens cached")
        if item.first_position + count > self.context_length:
            raise ValueError(f"{where}: {item.first_position + count} tokens exceed the context {self.context_length}")
        if int(item.token_ids.min()) < 0 or int(item.token_ids.max()) >= self._loaded.embedding_size:
            raise ValueError(f"{where}: token ids must be from 0 to {self._loaded.embedding_size - 1}")
        if item.parents is not None:
            if len(item.parents) > count:
                raise ValueError(f"{where}: a tree of {len(item.parents)} nodes in {count} tokens")
            check_parents(item.parents)

    def _try_out(self, model: str) -> None:
        """Run one token through the model, on all ranks alike, so that what cannot work is refused at start-up."""
        step = pack_step([StepInput(0, 0, token_ids([0]), 1)], [[PADDING_BLOCK + 1]])
        try:
            logits = self.execute(step)
        except (RuntimeError, TypeError) as error:
            # A peer that could not load leaves the group, which ends the collectives of this pass.
            if self.group is not None and not isinstance(error, (NotImplementedError, TypeError)):
                raise group_broken(error) from error
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(f"model {model} cannot run with a paged KV pool: {reason}") from error
        if logits.shape != (1, self.vocabulary_size):
            raise ConfigurationError(
                f"model {model} gives {logits.shape[-1]} logits for a tokenizer of {self.vocabulary_size} ids"
            )


def _check_ranks(config: EngineConfig, tensor_parallel: TensorParallelRank | None) -> None:
    ranks = 1 if tensor_parallel is None else tensor_parallel.world_size
    if ranks != config.tensor_parallel_size:
        raise ConfigurationError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and the group has {ranks} ranks"
        )
    check_tensor_parallel(config.model, config.tensor_parallel_size, config.trust_remote_code)
