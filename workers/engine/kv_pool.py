"""The tensors behind the KV blocks: one for keys and one for values per layer, allocated once."""

from dataclasses import dataclass

import torch

from workers.engine.block_pool import blocks_for
from workers.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token occupies on this rank: `layers` x 2 x `kv_heads` x `head_dim` numbers of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of all blocks.

    Per layer one tensor each, [(total_blocks + 1) * block_tokens, kv_heads, head_dim]; the first block is
    `PADDING_BLOCK`, which nobody owns.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_tokens: int

    @classmethod
    def create(cls, shape: KVShape, total_blocks: int, block_tokens: int, device: torch.device) -> "KVPool":
        """Allocate `total_blocks` and the padding block, all zeros."""
        size = ((total_blocks + 1) * block_tokens, shape.kv_heads, shape.head_dim)

        def tensors() -> tuple[torch.Tensor, ...]:
            return tuple(torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers))

        return cls(tensors(), tensors(), block_tokens)

    def write_(
        self, states: torch.Tensor, slots: torch.Tensor, entered_blocks: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Write `new` [N, kv_heads, head_dim] to `slots` int64 [N] of `states`, one of this pool's tensors.

        A block that is entered is zeroed first: whoever had it before may have left NaN in slots that are masked for
        now, and 0 times NaN is NaN.
        """
        if len(entered_blocks):
            states.view(-1, self.block_tokens * states[0].numel()).index_fill_(0, entered_blocks, 0.0)
        states.index_copy_(0, slots, new)

    def move_(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the entries at slots `sources` to `targets`, int64 [n] each, in every layer; they may overlap."""
        for states in (*self.keys, *self.values):
            states.index_copy_(0, targets, states.index_select(0, sources))


def affordable_blocks(shape: KVShape, kv_cache_gib: float, block_tokens: int, context_length: int) -> int:
    """Return how many blocks `kv_cache_gib` GiB hold.

    Raises ConfigurationError when they do not hold one sequence of `context_length` tokens.
    """
    if block_tokens < 1:
        raise ConfigurationError(f"block_tokens is {block_tokens}; it must be at least 1")
    block_bytes = shape.token_bytes * block_tokens
    blocks = int(kv_cache_gib * 2**30 // block_bytes)
    needed = blocks_for(context_length, block_tokens)
    if blocks < needed:
        raise ConfigurationError(
            f"kv_cache_gib {kv_cache_gib:g} is too small: one context of {context_length} tokens needs "
            f"{needed * block_bytes / 2**30:.3g} GiB (raise it, or lower max_context_tokens)"
        )
    return blocks
