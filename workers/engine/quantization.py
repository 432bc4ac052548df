"""Quantised weights: what each kind means on a device, whether it can be had, and how a model gets it."""

import importlib
import logging
from typing import TYPE_CHECKING, Any, Literal

import torch

from workers.engine.int8_linear import quantise_linear_layers
from workers.engine.model_files import is_gguf
from workers.errors import ConfigurationError

if TYPE_CHECKING:
    from workers.engine.config import EngineConfig

Quantization = Literal["none", "int8", "nf4", "auto"]
KINDS = ("none", "int8", "nf4", "auto")
_SUPPORTED_DEVICES = ("cpu", "cuda")


def check_quantization(config: "EngineConfig", device: torch.device) -> None:
    """Refuse what cannot work before anything is loaded.

    Raises ConfigurationError that names the key for an unknown kind, "auto" (which only drafters understand), another
    device than CPU and CUDA, tensor parallelism, a GGUF file (but for INT8 on the CPU) and a missing library.
    """
    kind = config.quantization
    if kind not in KINDS:
        raise ConfigurationError(f"quantization {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "none":
        return
    if kind == "auto":
        raise ConfigurationError("quantization auto is for drafters; a target's is chosen by name")
    if config.tensor_parallel_size > 1:
        raise ConfigurationError(
            f"quantization {kind} cannot be used with tensor_parallel_size {config.tensor_parallel_size}; "
            "set one of them to its default"
        )
    if device.type not in _SUPPORTED_DEVICES:
        raise ConfigurationError(f"quantization {kind} runs on cpu and cuda, not on device {device}")
    if uses_bitsandbytes(kind, device):
        if is_gguf(config.model):
            raise ConfigurationError(f"quantization {kind} on {device.type} cannot be used with a GGUF file")
        _import_bitsandbytes(kind)


def uses_bitsandbytes(kind: str, device: torch.device) -> bool:
    """Whether bitsandbytes does it. INT8 on the CPU is our own, since bitsandbytes' is slower than no quantisation."""
    return kind == "nf4" or (kind == "int8" and device.type != "cpu")


def quantises_afterwards(kind: str, device: torch.device) -> bool:
    """Whether a model is quantised in place once it is loaded, rather than by the library that loads it."""
    return kind == "int8" and not uses_bitsandbytes(kind, device)


def loading_options(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return what `from_pretrained` is told to quantise while it loads; nothing for what is done afterwards."""
    if not uses_bitsandbytes(kind, device):
        return {}
    from transformers import BitsAndBytesConfig

    make_config: Any = BitsAndBytesConfig
    if kind == "int8":
        # Without the decomposition of outliers, which looks at all rows of a step: a row's result must not depend on
        # its neighbours, or drafts would change a target's text.
        settings = make_config(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        settings = make_config(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    # It quantises where the weights are to be, the whole model on one device.
    place: int | str = (device.index or 0) if device.type == "cuda" else device.type
    return {"quantization_config": settings, "device_map": {"": place}}


def quantise_loaded(model: Any, config: "EngineConfig", device: torch.device) -> None:
    """Quantise a loaded model in place where loading has not done it.

    Tied weights stay, and so does the output layer unless `quantised_output` is set: then it gets weights of its own,
    and the embedding that it was tied to stays. Raises ConfigurationError when the model has no linear layers.
    """
    if not quantises_afterwards(config.quantization, device):
        return
    outputs = model.get_output_embeddings()
    output_names = {name for name, module in model.named_modules() if module is outputs}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    kept = {key.removesuffix(".weight") for key in (*tied.keys(), *tied.values())}
    kept = kept - output_names if config.quantised_output else kept | output_names
    if quantise_linear_layers(model, kept) == 0:
        raise ConfigurationError(f"quantization int8: model {config.model} has no linear layers to quantise")


def _import_bitsandbytes(kind: str) -> None:
    """Import the library, quietly. Raises ConfigurationError, one line, when it is missing or does not load."""
    quieten_bitsandbytes()
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:  # a broken CUDA set-up raises whatever its loader does
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"quantization {kind} needs the package bitsandbytes (pip install 'leadout[quantization]'): {reason}"
        ) from error


class _UselessWarnings(logging.Filter):
    """Drops what bitsandbytes says at every call, and its advice to install kernels that Leadout does without."""

    _beginnings = ("MatMul8bitLt: inputs will be cast from", "Failed to load CPU gemm_4bit_forward")

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginnings)


_USELESS_WARNINGS = _UselessWarnings()


def quieten_bitsandbytes() -> None:
    """Silence the warnings named above in the loggers that give them; the rest passes. Doing it twice is harmless."""
    for name in ("bitsandbytes.autograd._functions", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(_USELESS_WARNINGS)
