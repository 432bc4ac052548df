"""An engine without a model, whose KV entries give away any mistake in where they are read or written."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from workers.engine.engine import Engine
from workers.engine.groups import prepare_step
from workers.engine.kv_pool import KVPool, KVShape
from workers.engine.step import KVMoves, PackedStep

POISON = 7
"""The entry of this token is not a number, and so is every entry that builds on it."""


def next_entry(before: float, token: int) -> float:
    """Return the entry of `token` behind the entry `before`: a number that stands for the whole history."""
    return float("nan") if token == POISON else (before * 31 + token + 1) % 2**40


class ChainEngine(Engine):
    """Computes each entry from the one before it, which it reads through the block table as attention would."""

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        device = torch.device("cpu")
        pool = KVPool.create(KVShape(1, 1, 1, torch.float64), total_blocks, block_tokens, device)
        model: Any = SimpleNamespace(device=device, vocabulary_size=1, embedding_size=10, context_length=10_000)
        super().__init__(model, pool, total_blocks)
        self.copied_entries = 0

    @property
    def entries(self) -> torch.Tensor:
        """What each slot holds, float64 [(total_blocks + 1) * block_tokens]."""
        return self._pool.keys[0].view(-1)

    def slots(self, sequence_id: int) -> list[int]:
        """Where the entries of the sequence are."""
        cache = self._sequences[sequence_id]
        return cast(list[int], cache._slots(torch.arange(cache.length).numpy()).tolist()) if cache.length else []

    def execute(self, step: PackedStep) -> torch.Tensor:
        """See `Engine.execute`: the logits are the entries themselves, float64 [R, 1]."""
        metadata = prepare_step(step, self._pool, self.device)
        self._pool.write_(self._pool.keys[0], metadata.slots[:0], metadata.entered_blocks, self._pool.keys[0][:0])
        written, node_end = [], 0
        for index, count in enumerate(step.new_tokens.tolist()):
            end = int(step.context_lengths[index])
            nodes = int(step.tree_nodes[index]) if len(step.tree_nodes) else 0
            parents = step.parents[node_end : node_end + nodes].tolist()
            node_end += nodes
            places = [end - count + offset for offset in range(count)]
            above = [place - 1 for place in places[: count - nodes]]
            above += [end - nodes + parent if parent >= 0 else end - nodes - 1 for parent in parents]
            for place, parent in zip(places, above, strict=True):
                token = int(step.token_ids[len(written)])
                before = float(self.entries[self._slot(step, index, parent)]) if parent >= 0 else 0.0
                self.entries[self._slot(step, index, place)] = next_entry(before, token)
                written.append(self._slot(step, index, place))
            self._check_what_attention_reads(step, index, end)
        return self.entries[torch.tensor(written)[metadata.logit_rows]].unsqueeze(-1)

    def move(self, moves: KVMoves) -> None:
        """See `Engine.move`."""
        self.copied_entries += len(moves.sources)
        super().move(moves)

    def _slot(self, step: PackedStep, index: int, place: int) -> int:
        size = self.block_tokens
        return int(step.block_tables[index, place // size]) * size + place % size

    def _check_what_attention_reads(self, step: PackedStep, index: int, end: int) -> None:
        """Attention reads all slots of the table, masked ones too: only the sequence's own poison may be there."""
        size = self.block_tokens
        table = step.block_tables[index]
        read = self.entries.view(-1, size)[torch.from_numpy(table).long()].flatten()
        assert not read[end:].isnan().any() or read[:end].isnan().any(), "NaN that somebody else left"
