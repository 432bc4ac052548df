"""Tiny models of every supported family, built from configurations with fixed weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 96
CONTEXT = 160
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE: dict[str, Any] = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(num_key_value_heads=2, **_SHAPE),
    "qwen2": lambda: Qwen2Config(num_key_value_heads=2, **_SHAPE),
    "qwen2-sliding": lambda: Qwen2Config(
        num_key_value_heads=2, use_sliding_window=True, sliding_window=9, max_window_layers=1, **_SHAPE
    ),
    "qwen3": lambda: Qwen3Config(num_key_value_heads=2, head_dim=16, **_SHAPE),
    "mistral": lambda: MistralConfig(num_key_value_heads=2, sliding_window=9, **_SHAPE),
    "gemma3": lambda: Gemma3TextConfig(
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        **_SHAPE,
    ),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **_COMMON),
    "gpt_neox": lambda: GPTNeoXConfig(**_SHAPE),
    "phi": lambda: PhiConfig(**_SHAPE),
    "olmo": lambda: OlmoConfig(num_key_value_heads=2, **_SHAPE),
}


@dataclass(frozen=True)
class TinyModel:
    """A saved tiny model, and the same weights under transformers' own attention."""

    folder: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The unmodified model's logits for one whole sequence, float32 [n, vocabulary]."""
        with torch.no_grad():
            output = self.reference(input_ids=torch.tensor([token_ids]), use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits


def save_model(config: PreTrainedConfig, folder: Path) -> Any:
    """Build a model with fixed, well spread weights, save it, and return it."""
    torch.manual_seed(7)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual initialisation is so small that attention would hardly matter.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model
