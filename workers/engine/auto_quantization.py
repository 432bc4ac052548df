"""Which quantisation is fastest for a drafter on this machine: measured once, remembered in the user's cache."""

import contextlib
import gc
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from workers.engine.cache_folder import cache_folder
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.loading import resolve_device
from workers.engine.step import StepInput
from workers.errors import ConfigurationError, LeadoutError
from workers.messages import token_ids

logger = logging.getLogger(__name__)

CANDIDATES = ("none", "int8", "nf4")
_SEQUENCES, _WARM_UPS, _REPEATS = 4, 2, 5
_LIBRARIES = ("torch", "transformers", "bitsandbytes")

Measure = Callable[[EngineConfig], float]
"""Returns the milliseconds of a small step with a drafter loaded as this configuration says."""


def load_drafter(config: EngineConfig, measure: Measure | None = None) -> Engine:
    """Load a drafter: with "auto" in the fastest form, else as told; then one line is logged if plain is faster.

    What is not in the cache is measured first, each form loaded for itself and let go again, as far as memory and
    libraries allow. `measure` stands for the clock. Raises ConfigurationError as `Engine.load` does.
    """
    if config.quantization == "none":
        return Engine.load(config)
    chosen = config if config.quantization != "auto" else None
    # A kind that cannot be had is refused before anything else is measured.
    engine = None if chosen is None else Engine.load(chosen)
    times = step_times(config, CANDIDATES if chosen is None else ("none", config.quantization), measure or step_ms)
    if chosen is None:
        kind = min(times, key=lambda candidate: times[candidate])
        shown = ", ".join(f"{candidate} {ms:.3g} ms" for candidate, ms in times.items())
        logger.info("drafter %s: quantization auto takes %s (%s a step)", config.model, kind, shown)
        return Engine.load(replace(config, quantization=kind))
    if engine is None:
        raise AssertionError("an explicit kind is loaded first")
    _warn_if_slower(config, times)
    return engine


def _warn_if_slower(config: EngineConfig, times: dict[str, float]) -> None:
    plain, quantised = times.get("none"), times.get(config.quantization)
    if plain is not None and quantised is not None and quantised > plain:
        logger.warning(
            "drafter %s is slower with quantization %s than without: %.3g ms and %.3g ms a step; "
            "'none' or 'auto' drafts faster, if memory allows",
            config.model,
            config.quantization,
            quantised,
            plain,
        )


def step_times(config: EngineConfig, kinds: tuple[str, ...], measure: Measure) -> dict[str, float]:
    """Return the milliseconds of a step for each of `kinds` that can be loaded, from the cache where they are known.

    Raises ConfigurationError when none can be loaded, with the reason of the first.
    """
    path, key = cache_folder() / "quantization.json", _cache_key(config)
    known = _read(path).get(key, {})
    times, first_error = {}, None
    for kind in kinds:
        if kind in known:
            times[kind] = known[kind]
            continue
        try:
            times[kind] = measure(replace(config, quantization=kind))
        except LeadoutError as error:
            first_error = first_error or error
            logger.info("drafter %s: quantization %s is not measured: %s", config.model, kind, error)
    if first_error is not None and not times:
        raise first_error
    if times.keys() - known.keys():
        _write(path, key, known | times)
    return times


def step_ms(config: EngineConfig) -> float:
    """Load a drafter, time a step of one new token for a few sequences in milliseconds, and let the drafter go.

    Raises ConfigurationError as `Engine.load` does, and when the context is too short.
    """
    try:
        return _shortest_step_ms(Engine.load(config))
    finally:
        # The next one needs the memory, and asks what is free.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _shortest_step_ms(engine: Engine) -> float:
    length = min(8, engine.context_length - _WARM_UPS - _REPEATS)
    if length < 1:
        raise ConfigurationError(f"a context of {engine.context_length} tokens is too short to measure a step")
    prompt = token_ids([index % engine.vocabulary_size for index in range(length)])
    sequences = [index for index in range(_SEQUENCES) if index < engine.total_blocks]
    for sequence in sequences:
        engine.start(sequence)
    engine.forward([StepInput(sequence, 0, prompt, 1) for sequence in sequences])
    durations = []
    for step in range(_WARM_UPS + _REPEATS):
        began = time.perf_counter()
        inputs = [StepInput(sequence, length + step, prompt[:1], 1) for sequence in sequences]
        engine.forward(inputs).cpu()
        durations.append((time.perf_counter() - began) * 1e3)
    return min(durations[_WARM_UPS:])


def _cache_key(config: EngineConfig) -> str:
    device = resolve_device(config.device)
    # Ray and OpenMP set the threads of a process where the configuration does not.
    threads = config.threads or torch.get_num_threads()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_processor()}, {threads} threads"
    path = Path(config.model).expanduser()
    model = f"{path.resolve()} {path.stat().st_mtime_ns}" if path.exists() else config.model
    versions = ", ".join(f"{library} {_version(library)}" for library in _LIBRARIES)
    layers = "output quantised" if config.quantised_output else "output as it is"
    return f"{model} | {config.dtype} | {layers} | {hardware} | {versions}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "absent"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """Return the cache's content; a file that is missing or damaged is an empty cache."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, key: str, times: dict[str, float]) -> None:
    """Add an entry, at once for whoever reads. A cache that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _read(path) | {key: times}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(content, file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        logger.debug("quantisation times are not kept: %s", error)
