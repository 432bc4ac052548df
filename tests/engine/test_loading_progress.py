"""What loading shows, and what a process holds of the files it loads from."""

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_models import TinyModel
from tests.engine.weight_pages import mapped_and_owned_bytes
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.loading import load_model, shares_weights
from workers.engine.loading_progress import held_bytes

ROOT = Path(__file__).parents[2]
LOGGER = "workers.engine.loading_progress"
needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="says what is mapped on Linux only")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Puts a terminal in the place of standard error. Not a fixture: pytest puts its own there when a test begins."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "__stderr__", shown)
    return shown


def config(model: TinyModel, **options: object) -> EngineConfig:
    return EngineConfig(str(model.folder), device="cpu", kv_cache_gib=0.001, **options)  # type: ignore[arg-type]


def test_without_a_terminal_a_load_is_two_lines_with_seconds_and_gib(
    tiny_llama: TinyModel, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        loaded = load_model(config(tiny_llama))
    first, last = (record.getMessage() for record in caplog.records if record.name == LOGGER)
    gib = f"{held_bytes(loaded.model) / 2**30:.3g} GiB"
    assert first == f"loading {tiny_llama.folder} as float32 on cpu: {gib} of weights"
    assert last.startswith(f"loaded {tiny_llama.folder} as float32 on cpu in ")
    assert last.endswith(f" s: {gib} of weights")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    load_model(config(tiny_llama))
    assert "Loading weights" in shown.getvalue()
    assert "100%" in shown.getvalue()


def test_ranks_above_0_show_nothing(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = terminal(monkeypatch)
    with caplog.at_level(logging.INFO, LOGGER):
        load_model(config(tiny_llama), rank=1)
    assert shown.getvalue() == ""
    assert caplog.records == []


def test_no_bar_is_drawn_into_another_display(tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, display = terminal(monkeypatch), Terminal()
    monkeypatch.setattr(sys, "stderr", display)
    load_model(config(tiny_llama))
    assert shown.getvalue() == display.getvalue() == ""


def test_the_log_of_a_worker_s_process_tells_of_its_load(tiny_llama: TinyModel) -> None:
    code = (
        "import sys; from workers.engine.config import EngineConfig; from workers.target_worker import TargetWorker;"
        "config = EngineConfig(sys.argv[1], device='cpu', kv_cache_gib=0.001, threads=1);"
        "TargetWorker('worker', 'target', config, 0).load(('127.0.0.1', 0), 5.0)"
    )
    command = [sys.executable, "-c", code, str(tiny_llama.folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = [line for line in ended.stderr.splitlines() if f"INFO {LOGGER}: " in line]
    assert [line.partition(f"{LOGGER}: ")[2].split()[0] for line in told] == ["loading", "loaded"]


@needs_maps
def test_weights_in_their_own_dtype_are_the_pages_of_the_file(
    tiny_llama: TinyModel, load_engine: Callable[..., Engine]
) -> None:
    engine = load_engine(device="cpu")
    mapped, owned = mapped_and_owned_bytes(engine.model)
    parameters = 4 * sum(parameter.numel() for parameter in tiny_llama.reference.parameters())
    # Buffers (the frequencies of rotary positions) are computed.
    assert mapped == parameters
    assert owned < 0.01 * parameters
    assert shares_weights(config(tiny_llama), engine.device)


@needs_maps
def test_converted_weights_are_each_process_s_own(tiny_llama: TinyModel, load_engine: Callable[..., Engine]) -> None:
    engine = load_engine(device="cpu", dtype="bfloat16")
    mapped, owned = mapped_and_owned_bytes(engine.model)
    assert mapped == 0 and owned == held_bytes(engine.model)
    cpu = torch.device("cpu")
    assert not shares_weights(config(tiny_llama, dtype="bfloat16"), cpu)
    assert not shares_weights(config(tiny_llama, quantization="int8"), cpu)
    assert not shares_weights(config(tiny_llama), torch.device("cuda"))
