"""The shape of a configured model without loading it: from its folder, from what was downloaded, or from a table."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import PlanError
from cluster.known_models import KNOWN_MODELS, known_shape
from cluster.model_shapes import ModelShape, shape_from_config
from workers.engine.model_files import model_folder
from workers.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class FoundShape:
    """A shape, and where it is from: `files` or `table`."""

    shape: ModelShape
    origin: str


def find_shape(key: str, model: str) -> FoundShape:
    """Return the shape of `model`, a folder, GGUF file or Hugging Face id; nothing is downloaded.

    Raises ConfigurationError, one line with `key`, when it cannot be known.
    """
    file = _config_file(key, model)
    if file is None:
        shape = known_shape(model)
        if shape is None:
            raise ConfigurationError(
                f"{key}.model: the config.json of {model} is not on this machine (`hf download {model} config.json` "
                f"fetches it); known without files: {', '.join(KNOWN_MODELS)}"
            )
        return FoundShape(shape, "table")
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{key}.model: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{key}.model: {file} is not a JSON object")
    try:
        return FoundShape(shape_from_config(Path(model).name, content), "files")
    except PlanError as error:
        raise ConfigurationError(f"{key}.model: {error}") from error


def _config_file(key: str, model: str) -> Path | None:
    try:
        folder = model_folder(model)
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}.model: {error}") from error
    if folder is not None:
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise ConfigurationError(f"{key}.model: {model} is neither a folder nor a Hugging Face id") from error
    return Path(cached) if isinstance(cached, str) else None
