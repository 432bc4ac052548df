"""Quantised weights on the CPU: they load and draft, leave a target's ids alone, and are refused by the key's name."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from deployments.config import DrafterSection, TargetSection
from tests.engine.tiny_models import FAMILIES, TinyModel, save_model
from tests.engine.whole_rounds import noisy_copy, prompts, request, run_all
from workers.drafters.registry import DrafterSpec, build_drafter
from workers.engine.auto_quantization import load_drafter
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.int8_linear import Int8Linear, onednn_is_exact
from workers.engine.loading import memory_need
from workers.engine.quantization import check_quantization, loading_options, quieten_bitsandbytes
from workers.engine.step import StepInput
from workers.errors import ConfigurationError
from workers.messages import SamplingParams, token_ids
from workers.router.config import RouterConfig

KINDS = ("int8", "nf4")
ROUTER = RouterConfig(max_draft_tokens=4, propose_deadline_s=60, verify_deadline_s=60)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "leadout" / "quantization.json"


def wide_model(folder: Path, tied: bool) -> TinyModel:
    """A tiny model whose layers are wide enough for 4-bit blocks."""
    config = FAMILIES["qwen2"]()
    config.hidden_size, config.intermediate_size, config.tie_word_embeddings = 64, 128, tied
    return TinyModel(folder, save_model(config, folder))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return wide_model(tmp_path_factory.mktemp("wide"), tied=True)


def configuration(model: TinyModel | Path, **options: Any) -> EngineConfig:
    folder = model.folder if isinstance(model, TinyModel) else model
    settings: dict[str, Any] = {"device": "cpu", "kv_cache_gib": 0.002} | options
    return EngineConfig(str(folder), **settings)


def logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    engine.start(1)
    answer = engine.forward([StepInput(1, 0, token_ids(ids), len(ids))]).clone()
    engine.release((1,))
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_model_is_close_to_its_plain_form_but_not_equal(wide: TinyModel, kind: str, dtype: str) -> None:
    ids = [5, 6, 7, 8, 40, 41]
    quantised = logits(Engine.load(configuration(wide, dtype=dtype, quantization=kind)), ids)
    plain = wide.logits(ids)
    error = (quantised - plain).norm() / plain.norm()
    assert 0 < error < (0.1 if kind == "int8" else 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_layer_and_tied_embeddings_stay_as_they_are(wide: TinyModel, kind: str) -> None:
    model: Any = Engine.load(configuration(wide, quantization=kind)).model
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer).__name__ == {"int8": "Int8Linear", "nf4": "Linear4bit"}[kind]


@pytest.mark.parametrize("tied", [True, False])
def test_a_drafters_output_layer_can_be_int8_too_beside_the_embedding_it_was_tied_to(
    tied: bool, tmp_path: Path
) -> None:
    model = wide_model(tmp_path, tied)
    config = configuration(model, quantization="int8")
    with_output, without = (Engine.load(replace(config, quantised_output=told)) for told in (True, False))
    inner, other = cast(Any, with_output.model), cast(Any, without.model)
    assert type(inner.lm_head) is Int8Linear
    assert torch.equal(inner.model.embed_tokens.weight, other.model.embed_tokens.weight)
    ids = [5, 6, 7, 8, 40, 41]
    plain, found = model.logits(ids), logits(with_output, ids)
    assert (found - plain).norm() / plain.norm() < 0.1
    assert not torch.equal(found, logits(without, ids))


@pytest.mark.parametrize("tied", [True, False])
def test_the_memory_of_a_quantised_output_layer_is_counted(tied: bool, tmp_path: Path) -> None:
    config = configuration(wide_model(tmp_path, tied), quantization="int8", dtype="float32")
    cpu = torch.device("cpu")
    without, with_output = (memory_need(replace(config, quantised_output=told), cpu) for told in (False, True))
    parameters = 64 * FAMILIES["qwen2"]().vocab_size
    # A tied one gets weights beside the embedding's; another one's shrink from four bytes to one.
    assert with_output.weights - without.weights == (parameters if tied else -3 * parameters)
    assert with_output.loading - without.loading == (parameters if tied else 0)


def test_drafters_of_a_deployment_have_a_quantised_output_and_targets_do_not() -> None:
    section = {"model": "some/model", "quantization": "int8"}
    assert DrafterSection.model_validate(section | {"name": "small"}).spec().engine.quantised_output
    assert not TargetSection.model_validate(section).engine_config().quantised_output


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_drafter_changes_no_token(wide: TinyModel, kind: str, temperature: float) -> None:
    target = Engine.load(configuration(wide))
    drafter = Engine.load(configuration(wide, quantization=kind, quantised_output=True))
    asked = [request(prompt, SamplingParams(temperature=temperature, seed=5)) for prompt in prompts(3)]
    asked = [replace(one, request_id=str(index)) for index, one in enumerate(asked)]
    plain, _ = run_all(target, None, asked, ROUTER)
    drafted, _ = run_all(target, drafter, asked, ROUTER)
    assert [outcome.ids for outcome in drafted] == [outcome.ids for outcome in plain]
    assert sum(outcome.usage.accepted_tokens for outcome in drafted) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_target_gives_the_same_ids_with_and_without_drafts(
    wide: TinyModel, kind: str, temperature: float, tmp_path: Path
) -> None:
    target = Engine.load(configuration(wide, quantization=kind))
    drafter = Engine.load(configuration(noisy_copy(wide, tmp_path / "noisy", 0.02)))
    asked = [
        replace(request(prompt, SamplingParams(temperature=temperature, seed=9)), request_id=str(index))
        for index, prompt in enumerate(prompts(3))
    ]
    plain, _ = run_all(target, None, asked, ROUTER)
    drafted, _ = run_all(target, drafter, asked, ROUTER)
    assert [outcome.ids for outcome in drafted] == [outcome.ids for outcome in plain]
    assert sum(outcome.usage.accepted_tokens for outcome in drafted) > 0


def test_int8_works_for_layers_written_the_other_way_round(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("gpt2")
    ids = [5, 6, 7, 8]
    quantised = logits(Engine.load(configuration(model, quantization="int8")), ids)
    assert (quantised - model.logits(ids)).norm() / model.logits(ids).norm() < 0.1


# --- the layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_onednn", [True, False])
def test_a_row_of_an_int8_layer_does_not_depend_on_its_neighbours(
    with_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_onednn and not onednn_is_exact():
        pytest.skip("this processor or build has no exact INT8 product in oneDNN")
    monkeypatch.setattr("workers.engine.int8_linear.onednn_is_exact", lambda: with_onednn)
    torch.manual_seed(1)
    layer = Int8Linear(torch.randn(96, 64), torch.randn(96))
    rows = torch.randn(33, 64) * torch.logspace(-3, 3, 33)[:, None]
    together = layer(rows)
    for index in (0, 7, 32):
        assert torch.equal(layer(rows[index : index + 1])[0], together[index])
    assert torch.equal(layer(rows[:5]), together[:5])


@pytest.mark.parametrize("with_onednn", [True, False])
def test_an_int8_layer_multiplies_what_it_quantised_exactly(with_onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_onednn and not onednn_is_exact():
        pytest.skip("this processor or build has no exact INT8 product in oneDNN")
    monkeypatch.setattr("workers.engine.int8_linear.onednn_is_exact", lambda: with_onednn)
    weight = torch.randint(-127, 128, (32, 48)).float()
    rows = torch.randint(-127, 128, (3, 48)).float()
    # With 127 in each row the scales are 1, and nothing is lost.
    weight[:, 0] = rows[:, 0] = 127
    torch.testing.assert_close(Int8Linear(weight, None)(rows), rows @ weight.t(), rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zeros() -> None:
    assert torch.equal(Int8Linear(torch.randn(8, 16), None)(torch.zeros(2, 3, 16)), torch.zeros(2, 3, 8))


# --- refusals -----------------------------------------------------------------------------------------------------


def test_without_bitsandbytes_nf4_is_refused_in_one_line_and_int8_still_works_on_the_cpu(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigurationError, match=r"quantization nf4 needs the package bitsandbytes") as refusal:
        Engine.load(configuration(tiny_llama, quantization="nf4"))
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigurationError, match=r"quantization int8 needs the package bitsandbytes"):
        check_quantization(configuration(tiny_llama, quantization="int8"), torch.device("cuda"))
    Engine.load(configuration(tiny_llama, quantization="int8"))


@pytest.mark.parametrize(
    ("options", "device", "complaint"),
    [
        ({"quantization": "int3"}, "cpu", "quantization 'int3'"),
        ({"quantization": "auto"}, "cpu", "quantization auto is for drafters"),
        ({"quantization": "int8", "tensor_parallel_size": 2}, "cpu", "quantization int8.*tensor_parallel_size 2"),
        ({"quantization": "int8"}, "mps", "quantization int8 runs on cpu and cuda, not on device mps"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_key(
    tiny_llama: TinyModel, options: dict[str, Any], device: str, complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        check_quantization(configuration(tiny_llama, **options), torch.device(device))


def test_on_cuda_int8_is_asked_of_bitsandbytes_without_outliers() -> None:
    options = loading_options("int8", torch.bfloat16, torch.device("cuda"))
    assert options["quantization_config"].load_in_8bit
    assert options["quantization_config"].llm_int8_threshold == 0
    assert options["device_map"] == {"": 0}
    assert loading_options("nf4", torch.bfloat16, torch.device("cuda:1"))["device_map"] == {"": 1}
    assert loading_options("int8", torch.bfloat16, torch.device("cpu")) == {}


def test_bitsandbytes_does_not_warn_at_every_call(caplog: pytest.LogCaptureFixture) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
    rows = torch.randn(2, 64, dtype=torch.bfloat16)
    quieten_bitsandbytes()
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        layer(rows)
        layer(rows)
    assert caplog.records == []


@pytest.mark.parametrize("kind", KINDS)
def test_loading_and_running_print_nothing(
    wide: TinyModel, kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        logits(Engine.load(configuration(wide, dtype="bfloat16", quantization=kind)), [5, 6])
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


# --- auto ---------------------------------------------------------------------------------------------------------


class FakeTimer:
    """Tells scripted times instead of measuring."""

    def __init__(self, **times: float) -> None:
        self.times, self.asked = times, list[str]()

    def __call__(self, config: EngineConfig) -> float:
        self.asked.append(config.quantization)
        if config.quantization not in self.times:
            raise ConfigurationError(f"quantization {config.quantization} cannot be had")
        return self.times[config.quantization]


def layer_name(engine: Engine) -> str:
    model: Any = engine.model
    return type(model.model.layers[0].mlp.up_proj).__name__


def test_auto_takes_the_fastest_and_measures_once(wide: TinyModel, cache: Path) -> None:
    timer = FakeTimer(none=3.0, int8=1.0, nf4=2.0)
    config = configuration(wide, quantization="auto", threads=1)
    assert layer_name(load_drafter(config, timer)) == "Int8Linear"
    assert timer.asked == ["none", "int8", "nf4"]
    assert cache.is_file()
    assert layer_name(load_drafter(config, timer)) == "Int8Linear"
    assert len(timer.asked) == 3
    load_drafter(replace(config, threads=2, dtype="bfloat16"), timer)
    assert len(timer.asked) == 6
    torch.set_num_threads(1)


def test_auto_passes_over_what_cannot_be_had(wide: TinyModel) -> None:
    engine = load_drafter(configuration(wide, quantization="auto"), FakeTimer(none=2.0, int8=3.0))
    assert layer_name(engine) == "Linear"
    with pytest.raises(ConfigurationError, match="quantization none cannot be had"):
        load_drafter(configuration(wide, quantization="auto", dtype="float16"), FakeTimer())


def test_auto_measures_real_steps_and_survives_a_damaged_cache(wide: TinyModel, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("{")
    drafter = build_drafter(DrafterSpec("model", configuration(wide, quantization="auto")))
    assert drafter.limits.total_blocks > 0
    assert all(kind in cache.read_text() for kind in ("none", "int8", "nf4"))


def test_a_quantised_drafter_that_is_slower_is_reported_in_one_line(
    wide: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_drafter(configuration(wide, quantization="int8"), FakeTimer(none=1.0, int8=2.0))
    assert [record.getMessage().count("slower with quantization int8") for record in caplog.records] == [1]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_drafter(configuration(wide, quantization="nf4"), FakeTimer(none=2.0, nf4=1.0))
    assert caplog.records == []
