"""Finding the files of a model: a local folder or a Hugging Face id. Imports neither torch nor transformers."""

import json
from pathlib import Path
from typing import Any

from workers.errors import ConfigurationError


def model_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or None when it is a Hugging Face id.

    Raises ConfigurationError for a folder that is missing or has no config.json.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigurationError(f"model folder {model} has no config.json")
        return folder
    if _looks_like_a_path(model, folder):
        raise ConfigurationError(f"model folder {model} does not exist")
    return None


def _looks_like_a_path(model: str, folder: Path) -> bool:
    """An id is `name` or `owner/name`; whatever starts in an existing folder of ours was meant as a path."""
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or not model:
        return True
    return folder.parent != Path(".") and folder.parent.is_dir()


def model_file(model: str, name: str) -> Path | None:
    """Return the local path of the model's file `name`, downloading it when `model` is an id; None: has no such file.

    Raises ConfigurationError when the model itself cannot be found.
    """
    folder = model_folder(model)
    if folder is not None:
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError as error:
        raise unknown_model(model, error) from error
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unknown_model(model, error) from error


def unknown_model(model: str, error: Exception) -> ConfigurationError:
    """Return the one-line error for a model that cannot be loaded because of `error`."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigurationError(f"model {model} cannot be loaded: {reason}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises ConfigurationError, naming the file, when it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
