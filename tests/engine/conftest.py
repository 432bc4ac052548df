"""Fixtures of the engine's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny_models import FAMILIES, TinyModel, save_model
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Returns the tiny model of a family, built once per session."""
    built: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in built:
            folder = tmp_path_factory.mktemp(family)
            built[family] = TinyModel(folder, save_model(FAMILIES[family](), folder))
        return built[family]

    return get


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Where engines run: every test that loads one by `load_engine` runs on each device of the machine."""
    name: str = request.param
    return name


@pytest.fixture
def load_engine(tiny_llama: TinyModel, device: str) -> Callable[..., Engine]:
    """Loads an engine with a small pool; keyword arguments override its configuration."""

    def load(folder: Path = tiny_llama.folder, **options: Any) -> Engine:
        settings: dict[str, Any] = {"model": str(folder), "device": device, "kv_cache_gib": 0.001} | options
        return Engine.load(EngineConfig(**settings))

    return load
