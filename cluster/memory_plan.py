"""What one worker process takes of its device: weights, KV pool and the rest; what does not fit, and what would."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.accelerators import CATALOGUE, Accelerator
from cluster.model_shapes import QUANTISED_BYTES, ModelShape

GIB = 2**30
PROCESS_BYTES = GIB
"""Allowance for what a process takes of a GPU beside its tensors: CUDA's context, cuBLAS's and NCCL's workspaces."""
SPARE_SHARE = 0.03
"""Allowance for the holes of torch's allocator, of all memory of a GPU."""
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """What is asked of one process: `ranks` of them are one worker.

    `pool_bytes` is the KV pool of each rank, `context_tokens` the longest sequence, `sequences` how many share a round,
    `step_tokens` and `logit_rows` the widest step; `device_share` is less than 1 where processes share a GPU.
    """

    key: str
    shape: ModelShape
    dtype: str
    quantization: str
    ranks: int
    pool_bytes: int
    context_tokens: int
    sequences: int
    step_tokens: int
    logit_rows: int
    device_share: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one process on one device. `step` is what the widest step takes, `process` the runtime's own share."""

    need: WorkerNeed
    accelerator: Accelerator
    weights: int
    pool: int
    step: int
    process: int

    @property
    def rest(self) -> int:
        """All but weights and KV."""
        return self.step + self.process

    @property
    def total(self) -> int:
        """All that the process takes."""
        return self.weights + self.pool + self.rest

    @property
    def capacity(self) -> int | None:
        """What this process may take of the device; None: it is the machine's memory, of which nothing is known."""
        memory = self.accelerator.memory_bytes
        return None if memory is None else int(memory * min(1.0, self.need.device_share))

    @property
    def fits(self) -> bool:
        """Whether there is that much."""
        return self.capacity is None or self.total <= self.capacity

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token on this rank."""
        return self.need.shape.kv_token_bytes(self.need.dtype, self.need.ranks)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds, in whole blocks."""
        return self.pool // (self.token_bytes * BLOCK_TOKENS) * BLOCK_TOKENS


def plan_memory(need: WorkerNeed, accelerator: Accelerator) -> MemoryPlan:
    """Add up what one process of `need` takes on `accelerator`."""
    shape = need.shape
    weights = shape.weight_bytes(need.dtype, need.quantization, need.ranks).held
    step = shape.step_bytes(need.step_tokens, need.logit_rows, need.dtype, need.ranks)
    # Attention gathers the keys and values of a round's sequences, one layer at a time.
    gathered = need.pool_bytes // shape.layers
    capacity = accelerator.memory_bytes
    process = PROCESS_BYTES + int(SPARE_SHARE * capacity) if capacity is not None else 0
    return MemoryPlan(need, accelerator, weights, need.pool_bytes, step + gathered, process)


def memory_problems(plan: MemoryPlan) -> Iterator[str]:
    """Yield what forbids this plan, one line each, with numbers and with what would do."""
    need, shape = plan.need, plan.need.shape
    if need.ranks > 1:
        for count, what in ((shape.heads, "attention heads"), (shape.kv_heads, "KV heads")):
            if count % need.ranks:
                yield (
                    f"{need.key}.tensor_parallel_size: {need.ranks} does not divide the {count} {what} of {shape.name}"
                )
    if need.dtype == "bfloat16" and not plan.accelerator.has_bfloat16:
        yield f"{need.key}.dtype: {plan.accelerator.name} has no bfloat16; use float16"
    least = -(-need.context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS * plan.token_bytes
    if plan.pool < least:
        yield (
            f"{need.key}.kv_cache_gib: {plan.pool / GIB:.3g} GiB hold {plan.pool_tokens} tokens, and one context has "
            f"{need.context_tokens}: {least / GIB:.3g} GiB needed per GPU (or lower max_context_tokens)"
        )
    if not plan.fits:
        yield _too_large(plan)


def memory_warnings(plan: MemoryPlan) -> Iterator[str]:
    """Yield what will work, and not as well as one might think."""
    need = plan.need
    each = plan.pool_tokens // need.sequences
    if plan.fits and need.context_tokens > each > 0:
        yield (
            f"{need.key}.kv_cache_gib: {plan.pool_tokens} tokens are {plan.pool_tokens / need.context_tokens:.1f} "
            f"whole contexts, or {each} tokens for each of {need.sequences} sequences; beyond that they take turns"
        )


def _too_large(plan: MemoryPlan) -> str:
    need, device = plan.need, plan.accelerator
    capacity = plan.capacity or 0
    form = need.dtype if need.quantization == "none" else f"{need.dtype} with quantization {need.quantization}"
    where = f" at TP {need.ranks}" if need.ranks > 1 else ""
    # All that depends on the pool's size is the pool and what is gathered of it.
    beside = plan.total - plan.pool - plan.pool // need.shape.layers
    left = int((capacity - beside) / (1 + 1 / need.shape.layers))
    return (
        f"{need.key} does not fit on {need.ranks} x {device.name} for {need.shape.name} in {form}{where}: "
        f"{gigabytes(plan.weights)} weights per GPU + {gigabytes(plan.pool)} KV + {gigabytes(plan.rest)} for steps and "
        f"runtime = {gigabytes(plan.total)} of {gigabytes(capacity)}. "
        f"Would fit: {_list(_remedies(plan, left)) or 'nothing that is known'}"
    )


def _remedies(plan: MemoryPlan, left: int) -> Iterator[str]:
    need, device = plan.need, plan.accelerator
    least = need.context_tokens * plan.token_bytes
    if left >= least:
        yield f"kv_cache_gib {int(left / GIB * 10) / 10:g}"
    if need.quantization == "none" and need.ranks == 1:
        forms = (replace(need, quantization=form) for form in QUANTISED_BYTES)
        form = next((form for form in forms if plan_memory(form, device).fits), None)
        if form is not None:
            yield f"quantization {form.quantization}"
    # Drafters have no tensor parallelism.
    if need.key == "target" and need.quantization == "none":
        ranks = next((n for n in _larger_groups(need) if plan_memory(replace(need, ranks=n), device).fits), None)
        if ranks is not None:
            yield f"tensor_parallel_size {ranks} ({ranks} x {device.name})"
    larger = [
        each.name
        for each in CATALOGUE.values()
        if each.is_gpu and each.has_bfloat16 >= (need.dtype == "bfloat16") and plan_memory(need, each).fits
    ]
    if larger:
        yield f"{need.ranks} x {' or '.join(larger)}"


def _larger_groups(need: WorkerNeed) -> Iterator[int]:
    """Group sizes that divide the heads, and that machines have."""
    for ranks in (2, 4, 8):
        if ranks > need.ranks and not need.shape.heads % ranks and not need.shape.kv_heads % ranks:
            yield ranks


def _list(parts: Iterator[str]) -> str:
    return "; ".join(parts)


def gigabytes(count: float) -> str:
    """Return decimal gigabytes, as accelerators are sold by."""
    return f"{count / 1e9:.1f} GB"
