"""Whether a model fits: what weights and KV pool will need, and what the device has left."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.errors import ConfigurationError

# Bytes per weight of a linear layer, scales included: one float32 per row for int8, one per 64 weights for nf4.
_QUANTISED_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
_MEMINFO = Path("/proc/meminfo")
# Folder of the control group, and its files for limit and use: version 2, then version 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_CACHED_FILES = ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that one process takes: `weights` once it serves, `loading` at the worst moment before, and the KV `pool`.

    What one step needs for itself comes on top.
    """

    weights: int
    loading: int
    pool: int

    @property
    def total(self) -> int:
        """The larger of loading and serving."""
        return max(self.loading, self.weights + self.pool)


def weight_bytes(
    skeleton: torch.nn.Module,
    dtype: torch.dtype,
    quantization: str,
    loaded_first: bool = False,
    quantised_output: bool = False,
) -> int:
    """Return what a model's weights take in `dtype`, the linear layers quantised, the output only if told.

    `skeleton` is the model on the meta device, tied weights shared. With `loaded_first` all weights are there in
    `dtype` before they are quantised, layer by layer, and that is the peak: but for a quantised output that is tied to
    the embedding, as it gets weights of its own.
    """
    quantised = _QUANTISED_BYTES.get(quantization, float(dtype.itemsize))
    parameters = {id(parameter): parameter for parameter in skeleton.parameters()}
    output: Any = getattr(skeleton, "get_output_embeddings", lambda: None)()
    table: Any = getattr(skeleton, "get_input_embeddings", lambda: None)()
    is_tied = output is not None and table is not None and output.weight is table.weight
    total = sum(parameter.numel() for parameter in parameters.values())
    linear = sum(weight.numel() for weight in _linear_weights(skeleton, output))
    of_its_own = 0
    if quantised_output and output is not None:
        of_its_own = output.weight.numel() if is_tied else 0
        linear += 0 if is_tied else output.weight.numel()
    per_weight = dtype.itemsize if loaded_first else quantised
    return int((total - linear) * dtype.itemsize + linear * per_weight + of_its_own * quantised)


def _linear_weights(skeleton: torch.nn.Module, output: Any) -> list[torch.Tensor]:
    """Return the weights that quantisation would shrink, but the `output` layer's."""
    modules: list[Any] = list(skeleton.modules())
    return [
        module.weight
        for module in modules
        if module is not output and (type(module) is torch.nn.Linear or type(module).__name__ == "Conv1D")
    ]


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of `device`, or None where the system does not say.

    On the CPU it is what the system can give without swapping, or what the container's limit leaves, if that is less.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [left for left in (_system_bytes(), _container_bytes()) if left is not None]
    return min(known) if known else None


def check_memory(model: str, needed: int, available: int | None, kv_cache_gib: float) -> None:
    """Raise ConfigurationError, with both numbers, when `needed` bytes (KV pool included) are not `available`."""
    if available is not None and needed > available:
        raise ConfigurationError(
            f"model {model} needs {needed / 2**30:.3g} GiB (kv_cache_gib {kv_cache_gib:g} of it) and "
            f"{available / 2**30:.3g} GiB are available"
        )


def total_bytes(device: torch.device) -> int | None:
    """Return how much `device` could give at most, or None where the system does not say.

    On the CPU that is what is available now. Of a GPU it is all of its memory: asking what is free would take some.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_bytes(device)


def _system_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_bytes() -> int | None:
    """Return limit minus use of the control group, without the cached files that the kernel drops when it must."""
    for folder, limit_name, used_name in _CGROUPS:
        try:
            limit, used, statistics = (
                (folder / name).read_text(encoding="ascii").strip() for name in (limit_name, used_name, "memory.stat")
            )
        except OSError:
            continue
        if not limit.isdigit():
            return None
        counts = dict(line.split(" ", 1) for line in statistics.splitlines() if " " in line)
        return int(limit) - int(used) + sum(int(counts.get(name, 0)) for name in _CACHED_FILES)
    return None
