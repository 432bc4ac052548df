"""Loading a causal language model for paged execution."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from workers.engine.attention import ATTENTION_NAME, register_attention
from workers.engine.config import EngineConfig
from workers.engine.kv_pool import KVShape
from workers.engine.loading_progress import LoadingReport, can_draw_bar, quiet_transformers
from workers.engine.memory import MemoryNeed, available_bytes, check_memory, weight_bytes
from workers.engine.model_files import check_weight_files, is_gguf, model_file, model_folder, unknown_model
from workers.engine.quantization import check_quantization, loading_options, quantise_loaded, quantises_afterwards
from workers.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
# What transformers raises for files it cannot make a model of, and torch where the weights do not fit after all.
_UNLOADABLE = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError, SafetensorError)
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the engine must know of it.

    Ids from `vocabulary_size` (the tokenizer's) to `embedding_size` - 1 are padding and must never be produced.
    """

    model: torch.nn.Module
    vocabulary_size: int
    embedding_size: int
    context_length: int
    kv_shape: KVShape
    device: torch.device
    tokenizer_file: Path | None = None


def resolve_device(name: str) -> torch.device:
    """Return the torch device that `name` means; "auto" is CUDA where there is one, else the CPU.

    Raises ConfigurationError for a device that torch does not know or this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device {name!r} is not a device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {name!r} was asked for, and this machine has no CUDA device")
    return device


def load_config(model: str, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """Return the transformers configuration of `model` (of its text part).

    Raises ConfigurationError when the folder, its config.json or the model type is unknown.
    """
    from transformers import AutoConfig

    folder = model_folder(model)
    try:
        # Without a word about it, transformers would ask on the terminal.
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder or model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise unknown_model(model, error) from error
    return config.get_text_config()


def attention_shape(config: "PreTrainedConfig") -> tuple[int, int, int]:
    """Return (attention heads, KV heads, head dimension) of a model, before any sharding.

    Raises ConfigurationError for models without attention.
    """
    heads: int | None = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ConfigurationError(
            f"models of type {config.model_type} have no attention, so nothing of them can be paged"
        )
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, head_dim


def kv_shape(config: EngineConfig, text_config: "PreTrainedConfig") -> KVShape:
    """Return what one cached token occupies on each rank."""
    _, kv_heads, head_dim = attention_shape(text_config)
    layers: int = text_config.num_hidden_layers
    return KVShape(layers, kv_heads // config.tensor_parallel_size, head_dim, _DTYPES[config.dtype])


def load_model(config: EngineConfig, rank: int = 0) -> LoadedModel:
    """Load `config.model` in evaluation mode, with paged attention, on its device.

    With `tensor_parallel_size` above 1 every rank of the process group must call this, and each loads its share; rank 0
    alone shows progress. Raises ConfigurationError when the model is missing or cannot run here.
    """
    if config.dtype not in _DTYPES:
        raise ConfigurationError(f"dtype {config.dtype!r} is not one of {', '.join(_DTYPES)}")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    check_quantization(config, device)
    text_config = load_config(config.model, config.trust_remote_code)
    vocabulary_size, embedding_size = _check_model(config, text_config)
    need = memory_need(config, device)
    check_memory(config.model, need.total, available_bytes(device), config.kv_cache_gib)
    report = LoadingReport(f"{config.model} as {_form(config)} on {device}", need.weights, rank)
    model = _load_weights(config, device, can_draw_bar(rank))
    report.done(model)
    return LoadedModel(
        model=model,
        vocabulary_size=vocabulary_size,
        embedding_size=embedding_size,
        context_length=context_length(config.model, text_config, config.max_context_tokens),
        kv_shape=kv_shape(config, text_config),
        device=device,
        tokenizer_file=model_file(config.model, "tokenizer.json"),
    )


def _check_model(config: EngineConfig, text_config: "PreTrainedConfig") -> tuple[int, int]:
    """Refuse what the model's files already rule out; return the sizes of its vocabulary and of its embedding."""
    _check_layers(config.model, text_config)
    _check_unquantised(config, text_config)
    check_weight_files(config.model, config.allow_pickled_weights)
    embedding_size: int | None = getattr(text_config, "vocab_size", None)
    if embedding_size is None:
        raise ConfigurationError(f"model {config.model} ({text_config.model_type}) is not a language model")
    vocabulary_size = tokenizer_size(config.model) or embedding_size
    if vocabulary_size > embedding_size:
        raise ConfigurationError(
            f"model {config.model} has {embedding_size} logits for a tokenizer of {vocabulary_size} ids"
        )
    return vocabulary_size, embedding_size


def tokenizer_size(model: str) -> int | None:
    """Return one more than the largest token id of the model's tokenizer, or None when it has no tokenizer."""
    path = model_file(model, "tokenizer.json")
    if path is not None:
        from tokenizers import Tokenizer

        return max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()) + 1
    if not any(model_file(model, name) for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(model) or model, trust_remote_code=False)
        return int(max(tokenizer.get_vocab().values())) + 1
    except (OSError, ValueError) as error:
        raise unknown_model(model, error) from error


def needed_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the memory that loading and serving a model takes on this rank; see `memory_need`."""
    return memory_need(config, device).total


def memory_need(config: EngineConfig, device: torch.device) -> MemoryNeed:
    """Return what a model takes on each rank, from its configuration alone.

    Raises ConfigurationError when the model's class is not known.
    """
    from transformers import AutoModelForCausalLM

    dtype, kind = _DTYPES[config.dtype], config.quantization
    full_config = load_config(config.model, config.trust_remote_code)
    try:
        with torch.device("meta"), quiet_transformers():
            auto: Any = AutoModelForCausalLM
            skeleton: Any = auto.from_config(full_config, trust_remote_code=config.trust_remote_code)
        skeleton.tie_weights()
    except _UNLOADABLE as error:
        raise unknown_model(config.model, error) from error
    later = quantises_afterwards(kind, device)
    with_output = later and config.quantised_output
    weights, loading = (
        weight_bytes(skeleton, dtype, kind, loaded_first, with_output) // config.tensor_parallel_size
        for loaded_first in (False, later)
    )
    return MemoryNeed(
        weights=weights,
        loading=loading,
        pool=int(config.kv_cache_gib * 2**30),
    )


def shares_weights(config: EngineConfig, device: torch.device) -> bool:
    """Whether processes of one machine that load the model so hold its weights once: as mapped pages of its files.

    On the CPU that is so where weights are neither quantised nor converted to another dtype than that of the files.
    """
    if device.type != "cpu" or config.quantization != "none" or is_gguf(config.model):
        return False
    stored: Any = getattr(load_config(config.model, config.trust_remote_code), "dtype", None)
    return stored in (None, config.dtype, _DTYPES[config.dtype])


def _form(config: EngineConfig) -> str:
    return config.dtype if config.quantization == "none" else f"{config.dtype} with quantization {config.quantization}"


def _load_weights(config: EngineConfig, device: torch.device, bar: bool) -> Any:
    from transformers import AutoModelForCausalLM

    register_attention()
    dtype = _DTYPES[config.dtype]
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": config.trust_remote_code,
        **({} if config.allow_pickled_weights else {"use_safetensors": True}),
        **loading_options(config.quantization, dtype, device),
    }
    source: Path | str = model_folder(config.model) or config.model
    if is_gguf(config.model):
        file = Path(config.model).expanduser()
        source, options["gguf_file"] = file.parent, file.name
    if config.tensor_parallel_size > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=config.tensor_parallel_size)
    with quiet_transformers(bar):
        try:
            auto: Any = AutoModelForCausalLM
            model, found = auto.from_pretrained(source, **options, output_loading_info=True)
        except _UNLOADABLE as error:
            raise unknown_model(config.model, error) from error
    _check_complete(config.model, found["missing_keys"])
    if not model.is_backend_compatible():
        raise ConfigurationError(
            f"model {config.model} ({type(model).__name__}) does not let its attention be replaced"
        )
    quantise_loaded(model, config, device)
    if config.tensor_parallel_size == 1 and "device_map" not in options:
        model = model.to(device)
    return model.eval()


def _check_complete(model: str, missing: Collection[str]) -> None:
    """Refuse files without some of the model's tensors, which transformers would fill with random numbers."""
    if missing:
        named = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ConfigurationError(f"model {model} cannot be loaded: its files have no weights for {named}")


def _check_unquantised(config: EngineConfig, text_config: "PreTrainedConfig") -> None:
    """Refuse to quantise weights that already are."""
    own = getattr(text_config, "quantization_config", None)
    if own is not None and config.quantization != "none":
        raise ConfigurationError(
            f"quantization {config.quantization}: the weights of {config.model} are quantised already"
        )


def _check_layers(model: str, config: "PreTrainedConfig") -> None:
    """Refuse layers that keep another state than keys and values of past tokens."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _SUPPORTED_LAYERS:
        raise ConfigurationError(f"model {model} has layers that cannot be paged: {', '.join(sorted(kinds))}")


def context_length(model: str, text_config: "PreTrainedConfig", cap: int | None) -> int:
    """Return how many tokens a sequence may have: the model's own limit, or `cap` if that is smaller.

    Raises ConfigurationError when neither is known.
    """
    if cap is not None and cap < 1:
        raise ConfigurationError(f"max_context_tokens is {cap}; it must be at least 1")
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    known = [length for length in (own, cap) if length is not None]
    if not known:
        raise ConfigurationError(f"model {model} states no context length; set max_context_tokens")
    return min(known)
