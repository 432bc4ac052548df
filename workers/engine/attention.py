"""Attention over the paged KV pool, registered with transformers and used by its models unmodified."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.groups import AttentionGroup, StepMetadata

ATTENTION_NAME = "leadout_paged"

# Up to this many queries per sequence, query heads that share a key head are stacked as more queries of it, which
# reads each key once. Beyond, the stacked mask would cost more memory than repeating the keys.
_STACKED_QUERIES = 32


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers; doing it twice is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    step: StepMetadata | None = None,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Store this layer's new keys and values, then attend over each sequence's own cached tokens.

    `query` [1, heads, N, head_dim], `key` and `value` [1, kv_heads, N, head_dim], heads being those of this rank.
    `attention_mask` is ignored: `step` knows who sees whom. Returns [1, N, heads, head_dim].
    Raises NotImplementedError for models whose attention needs more than this.
    """
    if step is None:
        raise NotImplementedError("the model does not hand its keyword arguments on to attention")
    for name in ("softcap", "s_aux", "position_bias"):
        if unused.get(name) is not None:
            raise NotImplementedError(f"attention with {name} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = step.pool.keys[layer], step.pool.values[layer]
    for states, new in ((keys, key), (values, value)):
        step.pool.write_(states, step.slots, step.entered_blocks, new[0].transpose(0, 1))
    outputs = [_attend(group, query[0], keys, values, scaling, sliding_window) for group in step.groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unsqueeze(0), None


def _attend(
    group: AttentionGroup,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the group's rows [rows, heads, head_dim] for `query` [heads, N, head_dim] and the layer's pool."""
    heads, _, head_dim = query.shape
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    size, queries = group.size, group.queries
    padded = group.padded_rows
    rows = query[:, group.start : group.stop] if padded is None else query.index_select(1, padded)
    key, value = _gather(group, keys), _gather(group, values)
    copies = shared if queries <= _STACKED_QUERIES else 1
    if group.exact and window is None:
        bias = None
        key, value = key[:, :, : group.context], value[:, :, : group.context]
    else:
        bias = group.bias(window, copies, query.dtype)
    if copies < shared:
        key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
    stacked = rows.reshape(heads // copies, copies, size, queries, head_dim).permute(2, 0, 1, 3, 4)
    output = scaled_dot_product_attention(
        stacked.reshape(size, heads // copies, copies * queries, head_dim), key, value, attn_mask=bias, scale=scaling
    )
    output = output.view(size, heads // copies, copies, queries, head_dim).permute(0, 3, 1, 2, 4)
    output = output.reshape(size * queries, heads, head_dim)
    return output if group.kept_rows is None else output.index_select(0, group.kept_rows)


def _gather(group: AttentionGroup, states: torch.Tensor) -> torch.Tensor:
    """Return the group's cached keys or values, [B, kv_heads, W * block_tokens, head_dim]."""
    if group.first_slot is not None:
        return states[group.first_slot : group.first_slot + group.key_slots].transpose(0, 1).unsqueeze(0)
    _, kv_heads, head_dim = states.shape
    block_tokens = group.key_slots * group.size // len(group.blocks)
    # Whole blocks are long contiguous rows, so this runs at the speed of a memory copy.
    gathered = states.view(-1, block_tokens * kv_heads * head_dim).index_select(0, group.blocks)
    return gathered.view(group.size, group.key_slots, kv_heads, head_dim).transpose(1, 2)
