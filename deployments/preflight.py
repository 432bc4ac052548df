"""What can be refused before anything starts: missing models, different tokenizers, contexts, shards, small KV pools.

Reads no weights. Memory is checked by `machine_memory`, where the machine is known.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deployments.config import LeadoutConfig, WorkerSection
from workers.engine.config import EngineConfig
from workers.engine.kv_pool import affordable_blocks
from workers.engine.loading import context_length, kv_shape, load_config, tokenizer_size
from workers.engine.model_files import is_gguf, model_file
from workers.engine.pair import check_pair
from workers.engine.tensor_parallel import check_tensor_parallel
from workers.errors import ConfigurationError

Section = TypeVar("Section", bound=WorkerSection)
PROJECT_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What ingress and router know of the target: its tokenizer and its limits in tokens."""

    tokenizer_json: str
    vocabulary_size: int
    context_length: int


def check_deployment(config: LeadoutConfig) -> ServedModel:
    """Check models, pairs, shards and KV pools. Raises ConfigurationError, one line that names the key or folder."""
    target = config.target
    check_tensor_parallel(target.model, target.tensor_parallel_size, target.trust_remote_code)
    for drafter in config.drafters:
        check_pair(config.target.model, drafter.model)
    tokenizer = model_file(config.target.model, "tokenizer.json")
    vocabulary = tokenizer_size(config.target.model)
    if tokenizer is None or vocabulary is None:
        raise ConfigurationError(f"target.model: {config.target.model} has no tokenizer.json")
    context_tokens = _check_pool("target", target, target.engine_config(target.tensor_parallel_size))
    for index, drafter in enumerate(config.drafters):
        _check_pool(f"drafters[{index}]", drafter, drafter.engine_config())
    return ServedModel(
        tokenizer_json=tokenizer.read_text(encoding="utf-8"),
        vocabulary_size=vocabulary,
        context_length=context_tokens,
    )


def _check_pool(key: str, section: WorkerSection, engine: EngineConfig) -> int:
    """Check that the KV pool of a worker, or of each of its ranks, holds one whole context; return that in tokens."""
    text_config = load_config(section.model, section.trust_remote_code)
    context_tokens = context_length(section.model, text_config, section.max_context_tokens)
    shape = kv_shape(engine, text_config)
    try:
        affordable_blocks(shape, engine.kv_cache_gib, engine.block_tokens, context_tokens)
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}.{error}") from error
    return context_tokens


def resolve_models(config: LeadoutConfig) -> LeadoutConfig:
    """Return `config` with local model folders made absolute, since workers run in directories of their own.

    A relative folder is looked for in the working directory, then in the project.
    """
    return config.model_copy(
        update={
            "target": resolved_model(config.target),
            "drafters": [resolved_model(drafter) for drafter in config.drafters],
        }
    )


def resolved_model(section: Section) -> Section:
    """Return the section with its model's folder made absolute, if it is a folder; see `resolve_models`."""
    for folder in (Path(section.model).expanduser(), PROJECT_ROOT / section.model):
        if folder.is_dir() or (is_gguf(section.model) and folder.is_file()):
            return section.model_copy(update={"model": str(folder.resolve())})
    return section
