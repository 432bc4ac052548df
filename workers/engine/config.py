"""How an engine is configured."""

from dataclasses import dataclass

from workers.emulated.timing import TargetTiming


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one device, or on one rank of a tensor-parallel group.

    `model` is a local folder, a GGUF file or a Hugging Face id. `dtype` is "float32", "bfloat16" or "float16".
    `device` is "auto" (CUDA where there is one, else the CPU) or a torch device. `kv_cache_gib` is the memory of this
    rank's KV pool. `max_context_tokens` caps the context below the model's own; `threads` sets torch's CPU threads of
    the process. With `prefix_caching` the KV of a prompt is kept and shared with sequences that begin alike.

    `quantization` is of the linear layers: "none", "int8", "nf4", or for drafters "auto". With `quantised_output` INT8
    on the CPU is also the form of the output layer: for drafters, whose logits are guesses. Pickled weights are read,
    and code that comes with a model is run, only where `allow_pickled_weights` and `trust_remote_code` say so.

    With `emulated` a target takes another device's time; a drafter's is in its `DrafterSpec`.
    """

    model: str
    dtype: str = "float32"
    device: str = "auto"
    kv_cache_gib: float = 0.25
    block_tokens: int = 16
    max_context_tokens: int | None = None
    tensor_parallel_size: int = 1
    threads: int | None = None
    quantization: str = "none"
    quantised_output: bool = False
    allow_pickled_weights: bool = False
    trust_remote_code: bool = False
    prefix_caching: bool = True
    emulated: TargetTiming | None = None
