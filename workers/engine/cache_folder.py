"""Where this user's files that can be made again are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return Leadout's folder in `XDG_CACHE_HOME`, or in ~/.cache; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "leadout"
