"""Where models come from: GGUF files, pickled weights, code that comes along, gated ids; and whether they fit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.text import TextCodec
from tests.engine.tiny_models import CONTEXT, FAMILIES, TinyModel, save_model
from tests.fakes import byte_tokenizer
from workers.engine import memory
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.loading import load_config, needed_bytes
from workers.engine.model_files import unknown_model
from workers.engine.step import StepInput
from workers.errors import ConfigurationError
from workers.messages import token_ids

IDS = [5, 6, 7, 40, 41]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "leadout"


def logits(engine: Engine) -> torch.Tensor:
    engine.start(1)
    return engine.forward([StepInput(1, 0, token_ids(IDS), len(IDS))]).cpu()


def refusal(call: Callable[[], Any]) -> str:
    """The one line that `call` is refused with."""
    with pytest.raises(ConfigurationError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- GGUF ---------------------------------------------------------------------------------------------------------


def write_gguf(model: TinyModel, path: Path, architecture: str = "qwen2") -> Path:
    """Write a tiny Qwen2 with the byte tokenizer's tokens, in float32."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    config = model.reference.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = [token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])]
    tokens.append(tokens[1] + tokens[2])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(config.vocab_size - len(tokens)))])
    writer.add_token_merges([f"{tokens[1]} {tokens[2]}"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.reference.state_dict().items():
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(written, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def byte_qwen(tmp_path: Path) -> TinyModel:
    config = FAMILIES["qwen2"]()
    config.vocab_size, config.bos_token_id, config.eos_token_id = 264, 0, 0
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    return TinyModel(tmp_path / "qwen", save_model(config, tmp_path / "qwen"))


def test_a_gguf_file_is_a_model_with_its_tokenizer(
    byte_qwen: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(byte_qwen, tmp_path / "tiny.gguf")
    engine = load_engine(path, kv_cache_gib=0.002)
    assert (engine.vocabulary_size, engine.context_length) == (264, CONTEXT)
    assert engine.tokenizer_json() is not None
    with torch.no_grad():
        plain = byte_qwen.reference(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(engine), plain, atol=1e-4, rtol=0)
    codec = TextCodec.load(str(path))
    assert codec.vocabulary_size == 264
    assert 0 in codec.end_token_ids
    assert len(codec.encode("def f():")) > 0
    assert len(list((cache / "gguf").iterdir())) == 1


def test_a_gguf_file_can_be_int8_on_the_cpu_and_nothing_else(
    byte_qwen: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    path = write_gguf(byte_qwen, tmp_path / "tiny.gguf")
    assert torch.isfinite(logits(load_engine(path, quantization="int8", kv_cache_gib=0.002))).all()
    message = refusal(lambda: load_engine(path, quantization="nf4"))
    assert "quantization nf4 on cpu cannot be used with a GGUF file" in message


def test_a_gguf_file_that_is_missing_damaged_or_of_another_kind_is_refused(
    byte_qwen: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path, cache: Path
) -> None:
    assert "nowhere.gguf does not exist" in refusal(lambda: load_engine(tmp_path / "nowhere.gguf"))
    strange = write_gguf(byte_qwen, tmp_path / "strange.gguf", architecture="abacus")
    assert "abacus" in refusal(lambda: load_engine(strange))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF and nothing")
    assert "damaged.gguf cannot be read as GGUF" in refusal(lambda: load_engine(tmp_path / "damaged.gguf"))
    assert list((cache / "gguf").iterdir()) == []


def test_without_the_package_a_gguf_file_is_refused_by_the_extra_to_install(
    load_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("workers.engine.gguf.importlib.util.find_spec", lambda name: None)
    assert "needs the package gguf (pip install 'leadout[gguf]')" in refusal(
        lambda: load_engine(tmp_path / "tiny.gguf")
    )


# --- pickled weights and code --------------------------------------------------------------------------------------


def pickled_copy(model: TinyModel, folder: Path) -> Path:
    shutil.copytree(model.folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.reference.state_dict(), folder / "pytorch_model.bin")
    return folder


def test_pickled_weights_are_read_only_when_asked_for(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    folder = pickled_copy(tiny_llama, tmp_path / "pickled")
    message = refusal(lambda: load_engine(folder))
    assert "pytorch_model.bin" in message
    assert "allow_pickled_weights" in message
    answer = logits(load_engine(folder, allow_pickled_weights=True))
    torch.testing.assert_close(answer, tiny_llama.logits(IDS), atol=1e-4, rtol=0)


def test_safetensors_are_preferred_to_pickled_weights_beside_them(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    shutil.copytree(tiny_llama.folder, tmp_path / "both")
    (tmp_path / "both" / "pytorch_model.bin").write_bytes(b"no pickle")
    load_engine(tmp_path / "both")


def with_code(model: TinyModel, folder: Path) -> Path:
    """A copy whose classes come with it; running them leaves a file."""
    shutil.copytree(model.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "import pathlib\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"pathlib.Path({str(folder / 'was_run')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


def test_code_that_comes_with_a_model_runs_only_when_trusted(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    folder = with_code(tiny_llama, tmp_path / "own")
    assert "set trust_remote_code if you trust it" in refusal(lambda: load_engine(folder))
    assert not (folder / "was_run").exists()
    answer = logits(load_engine(folder, trust_remote_code=True))
    torch.testing.assert_close(answer, tiny_llama.logits(IDS), atol=1e-4, rtol=0)


# --- files that are not whole ---------------------------------------------------------------------------------------


def changed_weights(model: TinyModel, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model whose tensors were changed."""
    shutil.copytree(model.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_that_are_cut_off_missing_or_of_another_shape_are_refused(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    shutil.copytree(tiny_llama.folder, tmp_path / "cut")
    whole = (tmp_path / "cut" / "model.safetensors").stat().st_size
    for size in (whole // 2, 0):
        os.truncate(tmp_path / "cut" / "model.safetensors", size)
        assert "damaged or was not downloaded whole" in refusal(lambda: load_engine(tmp_path / "cut"))
    name = "model.layers.1.mlp.down_proj.weight"
    missing = changed_weights(tiny_llama, tmp_path / "missing", lambda tensors: tensors.pop(name))
    assert f"its files have no weights for {name}" in refusal(lambda: load_engine(missing))
    smaller = changed_weights(
        tiny_llama, tmp_path / "smaller", lambda tensors: tensors.update({name: tensors[name][:-1].clone()})
    )
    assert "other shapes than its config.json says" in refusal(lambda: load_engine(smaller))


# --- other refusals ------------------------------------------------------------------------------------------------


def test_gated_and_unknown_ids_are_explained() -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    response = httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co/a/b"))
    for kind, words in ((GatedRepoError, "is gated"), (RepositoryNotFoundError, "no model of this id")):
        error = OSError("several\nlines")
        error.__cause__ = kind("401", response=response)
        message = str(unknown_model("a/b", error))
        assert words in message and "a/b" in message and "\n" not in message


def test_an_unknown_architecture_and_one_that_writes_no_text_are_refused(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    assert "abacus" in refusal(lambda: load_engine(tmp_path))
    shutil.copytree(tiny_llama.folder, tmp_path / "clip")
    from transformers import SegformerConfig

    SegformerConfig().save_pretrained(tmp_path / "clip")
    assert str(tmp_path / "clip") in refusal(lambda: load_engine(tmp_path / "clip"))


def test_weights_that_are_quantised_already_are_not_quantised_again(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    folder = tmp_path / "gptq"
    shutil.copytree(tiny_llama.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert "quantised already" in refusal(lambda: load_engine(folder, quantization="int8"))
    assert str(folder) in refusal(lambda: load_engine(folder))


# --- memory --------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_with_both_numbers(
    load_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine.loading.available_bytes", lambda device: 2**30)
    load_engine(kv_cache_gib=0.5)
    message = refusal(lambda: load_engine(kv_cache_gib=3.0))
    assert "needs 3 GiB (kv_cache_gib 3 of it) and 1 GiB are available" in message
    monkeypatch.setattr("workers.engine.loading.available_bytes", lambda device: None)
    load_engine(kv_cache_gib=0.5)


def test_the_estimate_is_what_the_weights_take(tiny_llama: TinyModel, load_engine: Callable[..., Engine]) -> None:
    cpu = torch.device("cpu")

    def needed(**options: Any) -> int:
        return needed_bytes(EngineConfig(str(tiny_llama.folder), device="cpu", **options), cpu)

    parameters = sum(parameter.numel() for parameter in tiny_llama.reference.parameters())
    pool = int(0.25 * 2**30)
    assert needed() == 4 * parameters + pool
    assert needed(dtype="bfloat16") == 2 * parameters + pool
    layers = [layer for layer in tiny_llama.reference.model.modules() if type(layer) is torch.nn.Linear]
    linear = sum(layer.weight.numel() for layer in layers)
    assert needed(quantization="int8") == 4 * (parameters - linear) + linear + pool
    # Without a pool the peak is the loading itself, in full.
    assert needed(quantization="int8", kv_cache_gib=0.0) == 4 * parameters
    assert needed(quantization="nf4", kv_cache_gib=0.0) < 4 * (parameters - linear) + 0.6 * linear


def test_the_tighter_of_system_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, limit, used, statistics = (tmp_path / name for name in ("meminfo", "max", "current", "memory.stat"))
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path, "max", "current"),))
    cpu = torch.device("cpu")
    assert memory.available_bytes(cpu) == 4096 * 1024
    used.write_text("1000\n")
    statistics.write_text("anon 400\nactive_file 100\ninactive_file 500\n")
    limit.write_text("max\n")
    assert memory.available_bytes(cpu) == 4096 * 1024
    limit.write_text("5000\n")
    assert memory.available_bytes(cpu) == 4600
    meminfo.unlink()
    limit.unlink()
    assert memory.available_bytes(cpu) is None


def test_the_configuration_of_a_model_is_read_without_running_its_code(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = with_code(tiny_llama, tmp_path / "own")
    assert "trust_remote_code" in refusal(lambda: load_config(str(folder)))
    assert not (folder / "was_run").exists()
