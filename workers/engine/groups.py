"""What attention needs to know about a step, worked out once and used by every layer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.block_pool import blocks_for
from workers.engine.kv_pool import KVPool
from workers.engine.step import PackedStep
from workers.engine.tree_mask import TreeMask, tree_arrays, tree_mask

# Gathering a key costs about as much as scoring it with this many queries; the start of one more attention call
# about as much as scoring this many query-key pairs. Rough CPU measurements: only speed depends on them.
_GATHER_QUERIES = 4
_CALL_PAIRS = 2048
_PADDING_SHARE = 0.5


@dataclass(slots=True)
class AttentionGroup:
    """Neighbouring sequences of a packed step that attend in one call: B sequences, n queries each, W blocks each.

    Sequences with fewer than n new tokens repeat their last query; those extra rows are computed and dropped, so
    that no row is ever fully masked. `visible` says which of the W * block_tokens keys each query may see: causal
    order within its own sequence, and in trees ancestors only. Another shape of proposal needs another `visible` and
    nothing else.
    """

    start: int  # the group's rows of the packed step are start to stop - 1
    stop: int
    queries: int
    context: int  # longest context
    exact: bool  # one query each and equal contexts: all `context` keys are visible to it
    blocks: torch.Tensor  # int64 [B * W]
    first_slot: int | None  # of a single sequence whose blocks follow each other, which can be read in place
    positions: torch.Tensor  # int64 [B, n]
    padded_rows: torch.Tensor | None  # int64 [B * n], packed rows with repeats; None: no padding
    kept_rows: torch.Tensor | None  # int64 [stop - start], rows of [B * n] to keep; None: all
    key_slots: int  # W * block_tokens
    tree: TreeMask | None = None  # where there are trees among the sequences
    _biases: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """B, the number of sequences."""
        return self.positions.shape[0]

    def visible(self, window: int | None) -> torch.Tensor:
        """Return bool [B, n, W * block_tokens]; `window` limits how many tokens back a query sees, itself included."""
        keys = torch.arange(self.key_slots, device=self.positions.device)
        positions = self.positions.unsqueeze(-1)
        seen = keys <= (positions if self.tree is None else self.tree.ends.unsqueeze(-1))
        if window is not None:
            seen &= keys > positions - window
        if self.tree is not None:
            self.tree.add_to_(seen, window)
        return seen

    def bias(self, window: int | None, copies: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what to add to the scores, 0 or -inf: `dtype` [B, 1, copies * n, W * block_tokens].

        The rows repeat `copies` times, for query heads that share a key head. Layers with the same window share it.
        """
        bias = self._biases.get((window, copies))
        if bias is None:
            visible = self.visible(window).unsqueeze(1)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            bias = bias.repeat(1, 1, copies, 1) if copies > 1 else bias
            self._biases[window, copies] = bias
        return bias


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A packed step on the device, as the attention function and the model read it."""

    pool: KVPool
    token_ids: torch.Tensor  # int64 [1, N]
    position_ids: torch.Tensor  # int64 [1, N]
    slots: torch.Tensor  # int64 [N], where the new keys and values go
    entered_blocks: torch.Tensor  # int64 [E], blocks whose first slot is written in this step
    logit_rows: torch.Tensor  # int64 [R]
    groups: tuple[AttentionGroup, ...]


def group_bounds(new_tokens: Sequence[int], contexts: Sequence[int]) -> list[tuple[int, int]]:
    """Cut sequences, sorted by new tokens and then by context, into runs (first, end) that attend together.

    A run grows as long as padding it wastes less than another call would cost.
    """
    bounds: list[tuple[int, int]] = []
    first, real, longest = 0, 0, 0
    for index, (count, context) in enumerate(zip(new_tokens, contexts, strict=True)):
        cost = (count + _GATHER_QUERIES) * context
        padded = (index - first + 1) * (count + _GATHER_QUERIES) * max(longest, context)
        if index > first and padded - (real + cost) > _PADDING_SHARE * (real + cost) + _CALL_PAIRS:
            bounds.append((first, index))
            first, real, longest = index, 0, 0
        real += cost
        longest = max(longest, context)
    bounds.append((first, len(new_tokens)))
    return bounds


def prepare_step(step: PackedStep, pool: KVPool, device: torch.device) -> StepMetadata:
    """Work out slots, gather indices and groups of `step`, and move them to `device` in one copy."""
    starts = np.cumsum(step.new_tokens) - step.new_tokens
    sequence_of = np.repeat(np.arange(len(step.new_tokens)), step.new_tokens)
    places = step.places()
    block = step.block_tables[sequence_of, places // pool.block_tokens].astype(np.int64)
    slots = block * pool.block_tokens + places % pool.block_tokens
    entered = block[places % pool.block_tokens == 0]
    arrays: list[npt.NDArray[np.integer]] = [step.token_ids, step.positions, slots, entered, step.logit_rows]
    shared = len(arrays)
    layouts = [
        _lay_out(step, starts, first, end, pool.block_tokens)
        for first, end in group_bounds(step.new_tokens.tolist(), step.context_lengths.tolist())
    ]
    for layout in layouts:
        arrays += layout.arrays()
    packed = np.concatenate([array.ravel() for array in arrays]).astype(np.int64, copy=False)
    parts = _split(torch.from_numpy(packed).to(device), [array.size for array in arrays])
    rest = iter(parts[shared:])
    groups = tuple(layout.group(list(itertools.islice(rest, len(layout.arrays())))) for layout in layouts)
    token_ids, positions, slots_there, entered_there, logit_rows = parts[:shared]
    return StepMetadata(
        pool, token_ids.unsqueeze(0), positions.unsqueeze(0), slots_there, entered_there, logit_rows, groups
    )


def _split(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    ends = itertools.accumulate(sizes)
    return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """A group before it is on the device; the arrays are those of AttentionGroup."""

    start: int
    stop: int
    contexts: npt.NDArray[np.int32]
    key_slots: int
    tables: npt.NDArray[np.int32]  # [B, W]
    positions: npt.NDArray[np.int32]  # [B, n]
    padded_rows: npt.NDArray[np.integer]  # [B, n], or empty without padding
    kept_rows: npt.NDArray[np.integer]  # [stop - start], or empty without padding
    trees: tuple[npt.NDArray[np.integer], ...]  # of `tree_arrays`

    def arrays(self) -> list[npt.NDArray[np.integer]]:
        """Return what has to be on the device, in the order in which `group` takes it."""
        return [self.tables, self.positions, self.padded_rows, self.kept_rows, *self.trees]

    def first_slot(self) -> int | None:
        table: list[int] = self.tables[0].tolist()
        if len(self.tables) > 1 or table != list(range(table[0], table[0] + len(table))):
            return None
        return table[0] * (self.key_slots // len(table))

    def group(self, parts: Sequence[torch.Tensor]) -> AttentionGroup:
        blocks, positions, padded_rows, kept_rows, *trees = parts
        context = int(self.contexts.max())
        size, queries = self.positions.shape
        return AttentionGroup(
            start=self.start,
            stop=self.stop,
            queries=queries,
            context=context,
            exact=queries == 1 and int(self.contexts.min()) == context,
            blocks=blocks,
            first_slot=self.first_slot(),
            positions=positions.view(size, queries),
            padded_rows=padded_rows if len(padded_rows) else None,
            kept_rows=kept_rows if len(kept_rows) else None,
            key_slots=self.key_slots,
            tree=tree_mask(trees, (size, queries)),
        )


def _lay_out(step: PackedStep, starts: npt.NDArray[np.integer], first: int, end: int, block_tokens: int) -> _Layout:
    counts = step.new_tokens[first:end, None]
    contexts = step.context_lengths[first:end]
    offsets = np.arange(counts.max())[None]
    rows = starts[first:end, None] + np.minimum(offsets, counts - 1)
    needs_padding = counts.min() < counts.max()
    nothing = starts[:0]
    width = blocks_for(int(contexts.max()), block_tokens)
    positions = step.positions[rows]
    return _Layout(
        start=int(starts[first]),
        stop=int(starts[end - 1] + step.new_tokens[end - 1]),
        contexts=contexts,
        key_slots=width * block_tokens,
        tables=step.block_tables[first:end, :width],
        positions=positions,
        padded_rows=rows if needs_padding else nothing,
        kept_rows=np.flatnonzero(offsets < counts) if needs_padding else nothing,
        trees=tree_arrays(step, first, end, positions, width * block_tokens) if len(step.parents) else (),
    )
