"""Sizes from a config.json are those of the model that transformers builds from it, and of what the engine keeps."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from cluster.errors import PlanError
from cluster.known_models import known_shape
from cluster.model_shapes import QUANTISED_BYTES, ModelShape, shape_from_config
from tests.engine.tiny_models import FAMILIES
from workers.engine.kv_pool import KVShape
from workers.engine.loading import attention_shape
from workers.engine.memory import weight_bytes

SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma3")} | {
    "llama with biases": lambda: LlamaConfig(num_key_value_heads=2, attention_bias=True, mlp_bias=True, **SHAPE),
    "llama tied": lambda: LlamaConfig(tie_word_embeddings=True, head_dim=16, **SHAPE),
    "qwen2 tied": lambda: Qwen2Config(num_key_value_heads=4, tie_word_embeddings=True, **SHAPE),
    "gemma2": lambda: Gemma2Config(num_key_value_heads=2, head_dim=16, **SHAPE),
}


def saved_shape(config: PreTrainedConfig, folder: Path) -> ModelShape:
    config.save_pretrained(folder)
    return shape_from_config("model", json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    shape = saved_shape(config, tmp_path)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    skeleton.tie_weights()
    assert shape.parameters == sum(parameter.numel() for parameter in skeleton.parameters())
    for quantization in ("none", *QUANTISED_BYTES):
        assert shape.weight_bytes("bfloat16", quantization).held == weight_bytes(skeleton, torch.bfloat16, quantization)
    _, kv_heads, head_dim = attention_shape(config)
    engine = KVShape(config.num_hidden_layers, kv_heads, head_dim, torch.float16)
    assert shape.kv_token_bytes("float16") == engine.token_bytes


# Parameters as the model pages of Hugging Face state them.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-Coder-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
    ],
)
def test_known_models_have_their_published_parameters(model: str, parameters: int) -> None:
    shape = known_shape(model)
    assert shape is not None and shape.parameters == parameters


def test_ranks_share_all_but_norms_and_the_biases_behind_a_sum(tmp_path: Path) -> None:
    shape = saved_shape(CONFIGS["llama with biases"](), tmp_path)
    # Two norms, the output's and the MLP's bias in each of three layers, and the last norm, of 32 numbers each.
    copied = (3 * 4 + 1) * 32
    for ranks in (2, 4):
        kv_copies = max(0, ranks // 2 - 1) * 3 * 2 * (32 + 1) * 16  # two KV heads of 8: four ranks hold each twice
        together = ranks * shape.weight_bytes("float32", ranks=ranks).held
        assert together == 4 * (shape.parameters + (ranks - 1) * copied + kv_copies)
    assert shape.kv_token_bytes("float32", 2) * 2 == shape.kv_token_bytes("float32", 1)
    assert shape.kv_token_bytes("float32", 4) == shape.kv_token_bytes("float32", 2)


def test_a_step_reads_the_output_layer_and_not_the_input_embedding() -> None:
    untied, tied = known_shape("Llama-3-8B"), known_shape("Llama-3.2-1B")
    assert untied is not None and tied is not None
    size = untied.weight_bytes("bfloat16")
    assert size.held - size.read == 128_256 * 4096 * 2
    assert tied.weight_bytes("bfloat16").held == tied.weight_bytes("bfloat16").read


def test_what_is_not_known_is_said() -> None:
    assert known_shape("somebody/Llama-3-9B") is None
    with pytest.raises(PlanError, match=r"^model big: sizes of model type mixtral are not known \(known: llama"):
        shape_from_config("big", {"model_type": "mixtral"})
    with pytest.raises(PlanError, match=r"^model big: config\.json has no usable hidden_size"):
        shape_from_config("big", {"model_type": "llama", "num_attention_heads": 4})
