"""`leadout fetch` downloads what the config file's models lack, and nothing else."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from typer.testing import CliRunner

from benchmarks.harness import tiny_pair_config
from deployments.cli import cli


def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> dict[str, list[str]]:
    """Run the command on `arguments`; return the wanted patterns of each model that the hub was asked for."""
    asked: dict[str, list[str]] = {}

    def snapshot_download(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        if "missing" in model:
            raise LocalEntryNotFoundError("the hub cannot be reached")
        asked[model] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    content = tiny_pair_config()
    content["applications"][0]["args"] = arguments
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content))
    result = CliRunner().invoke(cli, ["fetch", str(file)])
    assert result.exit_code == (2 if "missing" in str(arguments) else 0), result.output
    return asked


def test_models_of_the_hub_are_fetched_once_each_and_local_ones_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"model": "maker/small", "allow_pickled_weights": True}
    drafters = [{"name": "a", **small}, {"name": "b", **small}, {"name": "c", "model": "models/tiny-code/draft"}]
    asked = fetched(tmp_path, monkeypatch, {"target": {"model": "maker/large"}, "drafters": drafters})
    assert sorted(asked) == ["maker/large", "maker/small"]
    assert "*.safetensors" in asked["maker/large"] and "*.bin" not in asked["maker/large"]
    assert "*.bin" in asked["maker/small"] and "*.py" not in asked["maker/small"]


def test_a_model_that_cannot_be_fetched_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(tmp_path, monkeypatch, {"target": {"model": "maker/missing"}}) == {}
