"""A drafter's quantised forms: time of a step, memory, and what the target still accepts.

`make bench BENCH=quantization ARGS="--target DIR --drafter DIR"` runs any pair; left out, the embedded one. `auto` is
what a deployment would choose here, by its own measurement. `QUICK=1` answers with fewer tokens.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, Row, report
from deployments.check_pair import MEASURED_DRAFT_TOKENS, PairOptions, answer_prompts
from deployments.text import TextCodec
from workers.engine.auto_quantization import CANDIDATES, step_ms, step_times
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.errors import LeadoutError
from workers.messages import TokenIds, token_ids

TINY = ROOT / "models" / "tiny-code"
BATCHES = (1, 8)
CONTEXT_TOKENS = 128
REPEATS = 11


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--drafter", type=Path, default=TINY / "draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-acceptance", action="store_true", help="time the drafter only")
    options = parser.parse_args()
    pair_options = PairOptions(options.dtype, options.threads, max_tokens=16 if options.quick else 48)
    target = None if options.no_acceptance else Engine.load(pair_options.target(str(options.target)))
    drafters = load_forms(options)
    case = f"{options.drafter.name}, {options.dtype}, {options.threads} threads"
    times = {batch: times_in_turn(drafters, batch) for batch in BATCHES}
    rows = [
        Row(f"{case}, {kind}: step of {batch} sequences", ms, "ms", bound=forms["none"], ratio=ms / forms["none"])
        for batch, forms in times.items()
        for kind, ms in forms.items()
    ]
    rows += [Row(f"{case}, {kind}: weights", weights_mib(drafter), "MiB") for kind, drafter in drafters.items()]
    if target is not None:
        codec = TextCodec.load(str(options.target))
        verify_ms = times_in_turn({"target": target}, 1, MEASURED_DRAFT_TOKENS + 1)["target"]
        rows.append(Row(f"target: verification of {MEASURED_DRAFT_TOKENS + 1} tokens", verify_ms, "ms"))
        for kind, drafter in drafters.items():
            acceptance, length = answer_prompts(target, drafter, codec, pair_options.max_tokens)
            print(f"{kind}: acceptance {acceptance:.3f}, accepted length {length:.3f}", flush=True)
            round_s = (verify_ms + MEASURED_DRAFT_TOKENS * times[1][kind]) / 1e3
            rows.append(Row(f"{case}, {kind}: acceptance of a draft", acceptance, "share", bound=1.0))
            rows.append(Row(f"{case}, {kind}: accepted length", length, "tokens", bound=5.0))
            rows.append(Row(f"{case}, {kind}: one sequence, by these times", length / round_s, "tokens/s"))
        rows.append(Row(f"{case}: one sequence without drafts, by these times", plain_rate(target), "tokens/s"))
    drafters.clear()
    rows += auto_rows(PairOptions(options.dtype, options.threads, "auto").drafter(str(options.drafter)))
    report("quantization", rows)


def load_forms(options: argparse.Namespace) -> dict[str, Engine]:
    """Load the drafter in all forms that work here, so that they can be timed in turn."""
    forms = {
        kind: PairOptions(options.dtype, options.threads, kind).drafter(str(options.drafter)) for kind in CANDIDATES
    }
    forms["int8 but for the output layer"] = replace(forms["int8"], quantised_output=False)
    drafters = {}
    for kind, config in forms.items():
        try:
            drafters[kind] = Engine.load(config)
        except LeadoutError as error:
            print(f"{kind}: {error}", flush=True)
    return drafters


def plain_rate(target: Engine) -> float:
    """Return the tokens per second of a target that decodes one sequence."""
    return 1e3 / times_in_turn({"target": target}, 1)["target"]


def auto_rows(config: EngineConfig) -> list[Row]:
    """Return what `quantization: auto` measures here, the form it takes first."""
    times = step_times(config, CANDIDATES, step_ms)
    ordered = sorted(times, key=lambda kind: times[kind])
    return [Row(f"auto: {kind}{' (taken)' if kind == ordered[0] else ''}", times[kind], "ms") for kind in ordered]


def times_in_turn(engines: Mapping[str, Engine], batch: int, new_tokens: int = 1) -> dict[str, float]:
    """Return the median milliseconds of a step of `new_tokens` for each of `batch` sequences, engines taking turns."""
    durations: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        for sequence in range(batch):
            engine.start(sequence)
            engine.forward([StepInput(sequence, 0, _ids(engine, CONTEXT_TOKENS), 1)])
    for _ in range(REPEATS):
        for name, engine in engines.items():
            ids = _ids(engine, new_tokens)
            began = time.perf_counter()
            engine.forward([StepInput(sequence, CONTEXT_TOKENS, ids, new_tokens) for sequence in range(batch)]).cpu()
            durations[name].append((time.perf_counter() - began) * 1e3)
    for engine in engines.values():
        engine.release(None)
    return {name: statistics.median(times[1:]) for name, times in durations.items()}


def _ids(engine: Engine, count: int) -> TokenIds:
    return token_ids([index % engine.vocabulary_size for index in range(count)])


def weights_mib(engine: Engine) -> float:
    """Return the memory of all parameters, buffers and packed INT8 weights, tied ones once."""
    tensors: dict[int, int] = {}
    for module in engine.model.modules():
        attributes: list[Any] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        attributes += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in attributes:
            # A packed tensor of oneDNN has no address; it is nobody else's.
            address = tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
            tensors[address] = tensor.numel() * tensor.element_size()
    return sum(tensors.values()) / 2**20


if __name__ == "__main__":
    main()
