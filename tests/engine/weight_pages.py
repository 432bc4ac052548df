"""Where a model's weights lie: in pages of its files, which processes share, or in memory of their own."""

import torch

from workers.engine.loading_progress import local_tensor


def mapped_and_owned_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes of weights and buffers in mapped safetensors, and the whole size of all other storages."""
    ranges = _safetensors_ranges()
    mapped, owned = 0, {}
    for tensor in {id(tensor): local_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())}.values():
        if any(first <= tensor.data_ptr() < end for first, end in ranges):
            mapped += tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            owned[storage.data_ptr()] = storage.nbytes()
    return mapped, sum(owned.values())


def _safetensors_ranges() -> list[tuple[int, int]]:
    ranges = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            if line.rstrip().endswith(".safetensors"):
                first, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
                ranges.append((first, end))
    return ranges
