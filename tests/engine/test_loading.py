"""Loading a model, and refusing one that cannot be served."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BloomConfig, MambaConfig

from tests.engine.tiny_models import CONTEXT, VOCABULARY, TinyModel, save_model
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.errors import ConfigurationError
from workers.messages import token_ids


def copy_with_tokenizer(model: TinyModel, folder: Path, size: int) -> Path:
    shutil.copytree(model.folder, folder)
    Tokenizer(WordLevel({f"t{index}": index for index in range(size)})).save(str(folder / "tokenizer.json"))
    return folder


def test_logits_end_where_the_tokenizer_ends(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = load_engine(copy_with_tokenizer(tiny_llama, tmp_path / "padded", VOCABULARY - 6))
    assert engine.vocabulary_size == VOCABULARY - 6
    engine.start(1)
    logits = engine.forward([StepInput(1, 0, token_ids([5, 6, 7]), 2)])
    assert logits.shape == (2, VOCABULARY - 6)
    torch.testing.assert_close(logits.cpu(), tiny_llama.logits([5, 6, 7])[1:, : VOCABULARY - 6], atol=1e-4, rtol=0)


def test_a_tokenizer_wider_than_the_logits_is_refused(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    folder = copy_with_tokenizer(tiny_llama, tmp_path / "narrow", VOCABULARY + 1)
    with pytest.raises(ConfigurationError, match=f"{VOCABULARY} logits for a tokenizer of {VOCABULARY + 1}"):
        load_engine(folder)


def test_without_a_tokenizer_the_model_decides_the_vocabulary(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine()
    assert (engine.vocabulary_size, engine.context_length, engine.sequences) == (VOCABULARY, CONTEXT, 0)


def test_a_missing_folder_and_a_missing_config_are_named(load_engine: Callable[..., Engine], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere does not exist$"):
        load_engine(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"has no config\.json$"):
        load_engine(tmp_path)


def test_a_folder_without_weights_is_refused_in_one_line(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    shutil.copy(tiny_llama.folder / "config.json", tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        load_engine(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"kv_cache_gib": 0.00001}, "kv_cache_gib"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_context_tokens": 0}, "max_context_tokens"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_an_impossible_option_is_named(
    options: dict[str, object], complaint: str, load_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load_engine(**options)


def test_the_context_can_be_capped_but_not_raised(load_engine: Callable[..., Engine]) -> None:
    assert load_engine(max_context_tokens=50).context_length == 50
    assert load_engine(max_context_tokens=CONTEXT + 1).context_length == CONTEXT


def test_half_precision_runs_and_answers_in_float32(load_engine: Callable[..., Engine]) -> None:
    engine = load_engine(dtype="bfloat16")
    engine.start(1)
    logits = engine.forward([StepInput(1, 0, token_ids([5, 6, 7]), 3)])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4),
        BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4),
    ],
)
def test_a_model_that_cannot_be_paged_is_refused(
    config: MambaConfig | BloomConfig, load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    save_model(config, tmp_path)
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        load_engine(tmp_path, max_context_tokens=64)


def test_a_model_with_soft_capped_attention_is_refused(load_engine: Callable[..., Engine], tmp_path: Path) -> None:
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
    )
    save_model(config, tmp_path)
    with pytest.raises(ConfigurationError, match="softcap"):
        load_engine(tmp_path)


def test_loading_prints_nothing(
    load_engine: Callable[..., Engine], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_engine()
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_the_pair_check_imports_no_torch() -> None:
    code = "import json, sys; import workers.engine.pair; print(json.dumps('torch' in sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) is False
