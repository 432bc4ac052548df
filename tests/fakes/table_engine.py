"""An engine whose model is a table: small enough to enumerate, fast enough for many thousands of sequences."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.engine import Engine
from workers.engine.step import AcceptedPath, StepInput
from workers.messages import TokenIds

Table: TypeAlias = npt.NDArray[np.float32]
"""Logits of the next token by the last two tokens, [V, V, V]."""


def random_table(seed: int, vocabulary: int, spread: float) -> Table:
    """Return normally distributed logits."""
    return np.random.default_rng(seed).normal(0, spread, (vocabulary,) * 3).astype(np.float32)


class TableEngine:
    """What `Engine` offers to verifier and drafter, over a table instead of a transformer."""

    block_tokens = 16
    total_blocks = free_blocks = 1_000_000
    context_length = 1_000_000
    prefix_caching = False

    def __init__(self, table: Table) -> None:
        self.vocabulary_size = table.shape[0]
        self._table = torch.from_numpy(table)
        self._tokens: dict[int, list[int]] = {}

    def as_engine(self) -> Engine:
        """Return this as the type that its users declare."""
        return cast(Engine, self)

    def tokenizer_json(self) -> str | None:
        """See `Engine.tokenizer_json`: a table has no tokenizer."""
        return None

    @property
    def sequences(self) -> int:
        """How many sequences are known."""
        return len(self._tokens)

    def start(self, sequence_id: int, known: TokenIds | None = None, salt: str | None = None) -> int:
        """See `Engine.start`."""
        self._tokens[sequence_id] = []
        return 0

    def length(self, sequence_id: int) -> int | None:
        """See `Engine.length`."""
        return len(self._tokens[sequence_id]) if sequence_id in self._tokens else None

    def truncate(self, sequence_id: int, length: int) -> None:
        """See `Engine.truncate`."""
        assert length <= len(self._tokens[sequence_id])
        del self._tokens[sequence_id][length:]

    def keep_paths(self, paths: Sequence[AcceptedPath]) -> None:
        """See `Engine.keep_paths`: chains have none."""
        assert not paths

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """See `Engine.release`."""
        for sequence_id in list(self._tokens) if sequence_ids is None else sequence_ids:
            self._tokens.pop(sequence_id, None)

    def forward(self, inputs: Sequence[StepInput]) -> torch.Tensor:
        """See `Engine.forward`."""
        contexts: list[tuple[int, int]] = []
        for item in inputs:
            assert item.parents is None
            tokens = self._tokens[item.sequence_id]
            self.truncate(item.sequence_id, item.first_position)
            tokens += item.token_ids.tolist()
            ends = range(len(tokens) - item.logit_rows, len(tokens))
            contexts += [(tokens[end - 1], tokens[end]) for end in ends]
        before, last = torch.tensor(contexts, dtype=torch.int64).reshape(-1, 2).unbind(-1)
        return self._table[before, last]
