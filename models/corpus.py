"""The training corpus of the tiny-code pair: the Python standard library's own sources, split by module."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Code tables and test suites would drown the prose-like code that people write by hand.
EXCLUDED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 1 / 32


@dataclass(frozen=True)
class SourceModule:
    """One standard-library module: its path relative to the library root, and its text."""

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Whether the whole module `name` belongs to the evaluation split (decided by its name alone)."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def standard_library_modules(root: Path | None = None) -> Iterator[SourceModule]:
    """Yield the modules of the running interpreter's standard library in a fixed order."""
    library = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if EXCLUDED_DIRECTORIES.isdisjoint(relative.parts):
            yield SourceModule(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def split_modules() -> tuple[list[SourceModule], list[SourceModule]]:
    """Return (training modules, held-out modules)."""
    modules = [module for module in standard_library_modules() if module.text.strip()]
    training = [module for module in modules if not is_held_out(module.name)]
    held_out = [module for module in modules if is_held_out(module.name)]
    return training, held_out


def held_out_prompts(count: int, min_lines: int = 6, max_lines: int = 24) -> list[str]:
    """Return `count` prompts cut from held-out modules, evenly spread and always the same.

    A prompt is a run of whole source lines that starts at a definition or an import and ends at a line break, so that
    a completion begins a new line of code.
    """
    candidates: list[str] = []
    for module in split_modules()[1]:
        lines = module.text.splitlines(keepends=True)
        for start, line in enumerate(lines):
            if not line.lstrip().startswith(("def ", "class ", "import ", "from ", "@")):
                continue
            length = min_lines + (start * 7) % (max_lines - min_lines + 1)
            chunk = "".join(lines[start : start + length])
            if start + length <= len(lines) and len(chunk) < 1_500:
                candidates.append(chunk)
    if len(candidates) < count:
        raise ValueError(f"only {len(candidates)} held-out prompts exist, {count} were asked for")
    stride = len(candidates) / count
    return [candidates[int(index * stride)] for index in range(count)]
