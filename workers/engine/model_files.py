"""Finding the files of a model: a local folder, a GGUF file or a Hugging Face id.

Imports neither torch nor transformers, unless a GGUF file is to be unpacked.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.errors import ConfigurationError


def is_gguf(model: str) -> bool:
    """Whether `model` names a GGUF file."""
    return model.endswith(".gguf")


def model_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or None when it is a Hugging Face id.

    For a GGUF file it is the folder with what was unpacked of it; the weights stay in the file.

    Raises ConfigurationError for a folder that is missing or has no config.json, and for a GGUF file that cannot be
    read.
    """
    folder = Path(model).expanduser()
    if is_gguf(model):
        from workers.engine.gguf import unpacked_folder

        return unpacked_folder(folder)
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


def check_weight_files(model: str, allow_pickled_weights: bool) -> None:
    """Refuse a local folder without weights, and one with pickled weights alone: reading those can run any code.

    Files of a Hugging Face id are chosen when it is loaded. Raises ConfigurationError.
    """
    folder = None if is_gguf(model) else model_folder(model)
    if folder is None or any(folder.glob("*.safetensors")):
        return
    pickled = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))), None)
    if pickled is None:
        raise ConfigurationError(f"model folder {model} has no weights (*.safetensors)")
    if not allow_pickled_weights:
        raise ConfigurationError(
            f"model {model} has pickled weights only ({pickled}), which can run code when read; "
            "set allow_pickled_weights if you trust them"
        )


def unknown_model(model: str, error: Exception) -> ConfigurationError:
    """Return the one-line error for a model that cannot be loaded because of `error`."""
    causes = {type(cause).__name__ for cause in _chain(error)}
    text = str(error)
    if "GatedRepoError" in causes:
        reason = "it is gated; accept its licence on Hugging Face and log in (hf auth login, or HF_TOKEN)"
    elif "RepositoryNotFoundError" in causes:
        reason = "Hugging Face has no model of this id, or it is private and you are not logged in"
    elif "trust_remote_code" in text:
        reason = "it needs code that comes with it; set trust_remote_code if you trust it"
    elif "safetensors" in text and "does not appear to have a file" in text:
        reason = "it has no weights in safetensors; set allow_pickled_weights if you trust its pickled ones"
    elif "SafetensorError" in causes:
        reason = f"a file of weights is damaged or was not downloaded whole ({text})"
    elif "ignore_mismatched_sizes" in text:
        reason = "its weights have other shapes than its config.json says"
    else:
        reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return ConfigurationError(f"model {model} cannot be loaded: {reason}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises ConfigurationError, naming the file, when it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
