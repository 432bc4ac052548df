"""How large a model is, from the numbers in its config.json: parameters, and what each rank holds and reads of them.

Known are decoders of the Llama kind: attention with grouped heads, a gated MLP, and norms. Weights are counted as
`workers.engine.memory` counts those of the modules themselves, and shared out as transformers does: projections and
embeddings are split, norms and the biases behind a sum over ranks are held by all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import PlanError

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BYTES: Mapping[str, float] = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes per weight of a linear layer, scales included."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of one rank's weights: `held` in memory, `read` by each step, at one token or many."""

    held: int
    read: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder.

    `layer_norms` counts norm vectors of `hidden` numbers in each layer; `head_norms` says whether queries and keys have
    norms of their own; `tied`, whether the output layer is the embedding.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int | None
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_norms: int = 2
    head_norms: bool = False

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return (
            self._linear(1) + self._split_biases(1) + self._whole() + self._embeddings * self.vocabulary * self.hidden
        )

    def kv_heads_of_rank(self, ranks: int) -> int:
        """KV heads that one rank keeps; where there are fewer than ranks each keeps a copy of one."""
        return -(-self.kv_heads // ranks)

    def kv_token_bytes(self, dtype: str, ranks: int = 1) -> int:
        """Return what one cached token takes on each rank: keys and values of all layers, as in the KV pool."""
        return 2 * self.layers * self.kv_heads_of_rank(ranks) * self.head_dim * DTYPE_BYTES[dtype]

    def weight_bytes(self, dtype: str, quantization: str = "none", ranks: int = 1) -> WeightBytes:
        """Return bytes per rank; linear layers but the output are quantised; a step reads no whole embedding."""
        plain = DTYPE_BYTES[dtype]
        layers = self._linear(ranks) * QUANTISED_BYTES.get(quantization, float(plain))
        others = (self._split_biases(ranks) + self._whole()) * plain
        table = -(-self.vocabulary // ranks) * self.hidden * plain
        return WeightBytes(int(layers + others + self._embeddings * table), int(layers + others + table))

    def token_flops(self, ranks: int = 1) -> float:
        """Operations per token and rank: two per weight that is multiplied. Attention over the context is left out."""
        return 2.0 * (self._linear(ranks) + -(-self.vocabulary // ranks) * self.hidden)

    def step_bytes(self, tokens: int, rows: int, dtype: str, ranks: int = 1) -> int:
        """Return what one step of `tokens` tokens and `rows` rows of logits takes at its widest, beside KV and weights.

        That is one layer's MLP (input, residual, gate, up and their product), or the logits and their float32 copy.
        """
        size = DTYPE_BYTES[dtype]
        mlp = tokens * (2 * self.hidden + 3 * self.intermediate // ranks) * size
        logits = rows * self.vocabulary * (size + 4) + tokens * self.hidden * size
        return max(mlp, logits)

    @property
    def _embeddings(self) -> int:
        return 1 if self.tied else 2

    def _linear(self, ranks: int) -> int:
        """Weights of all projections on one rank."""
        queries = self.heads * self.head_dim // ranks
        keys = self.kv_heads_of_rank(ranks) * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        return self.layers * (attention + 3 * self.hidden * self.intermediate // ranks)

    def _split_biases(self, ranks: int) -> int:
        queries = self.heads * self.head_dim // ranks
        keys = self.kv_heads_of_rank(ranks) * self.head_dim
        return self.layers * (self.qkv_bias * (queries + 2 * keys) + self.mlp_bias * 2 * self.intermediate // ranks)

    def _whole(self) -> int:
        """What every rank holds."""
        norms = self.layer_norms * self.hidden + 2 * self.head_norms * self.head_dim
        biases = (self.output_bias + self.mlp_bias) * self.hidden
        return self.layers * (norms + biases) + self.hidden


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type has where its configuration does not say."""

    qkv_bias: bool | None = None  # None: as `attention_bias` says, the output's too
    layer_norms: int = 2
    head_norms: bool = False
    tied: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(qkv_bias=False),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms=True),
    "gemma2": _Family(layer_norms=4, tied=True),
    "gemma3_text": _Family(layer_norms=4, head_norms=True, tied=True),
}


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that the content of a config.json describes. Raises PlanError, which says what is missing."""
    config = config.get("text_config", config)
    kind = config.get("model_type")
    family = _FAMILIES.get(str(kind))
    if family is None:
        raise PlanError(f"model {name}: sizes of model type {kind} are not known (known: {', '.join(_FAMILIES)})")

    def number(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"model {name}: config.json has no usable {key}")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    bias = bool(config.get("attention_bias", False))
    follows = family.qkv_bias is None
    return ModelShape(
        name=name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=number("vocab_size"),
        context_tokens=config.get("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias and follows,
        mlp_bias=bool(config.get("mlp_bias", False)),
        layer_norms=family.layer_norms,
        head_norms=family.head_norms,
    )
