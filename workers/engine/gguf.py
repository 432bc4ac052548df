"""GGUF files: their configuration and tokenizer are unpacked once, into a folder like any other model's."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from workers.engine.cache_folder import cache_folder
from workers.errors import ConfigurationError


def unpacked_folder(path: Path) -> Path:
    """Return the folder with config.json and tokenizer.json of a GGUF file, made on the first call (in the cache).

    Weights stay in the file. Raises ConfigurationError, in one line, for a file that is missing, is no GGUF or has an
    architecture that transformers cannot read, and when the package gguf is not installed.
    """
    if not path.is_file():
        raise ConfigurationError(f"model file {path} does not exist")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(f"model file {path} needs the package gguf (pip install 'leadout[gguf]')")
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _unpack(path, fresh)
            # Another process may have been faster; its folder is as good.
            if not folder.exists():
                os.replace(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _unpack(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    except Exception as error:  # its readers raise what their parsers do
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(f"model file {path} cannot be read as GGUF: {reason}") from error
