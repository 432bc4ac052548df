"""A drafter's quantised forms: time of a step, memory, and what the target still accepts.

`make bench BENCH=quantization ARGS="--target DIR --drafter DIR"` runs any pair; left out, the embedded one. `auto` is
what a deployment would choose here, by its own measurement. `QUICK=1` answers with fewer tokens.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, Row, report
from deployments.check_pair import PairOptions, answer_prompts
from deployments.text import TextCodec
from workers.engine.auto_quantization import CANDIDATES, step_ms, step_times
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.errors import LeadoutError
from workers.messages import token_ids

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
    codec = TextCodec.load(str(options.target))
    rows, plain = list[Row](), dict[int, float]()
    for kind in CANDIDATES:
        config = PairOptions(options.dtype, options.threads, kind).drafter(str(options.drafter))
        try:
            drafter = Engine.load(config)
        except LeadoutError as error:
            print(f"{kind}: {error}", flush=True)
            continue
        case = f"{options.drafter.name}, {options.dtype}, {options.threads} threads, {kind}"
        for batch in BATCHES:
            duration = measured_step_ms(drafter, batch)
            plain.setdefault(batch, duration)
            label = f"{case}: step of {batch} sequences"
            rows.append(Row(label, duration, "ms", bound=plain[batch], ratio=duration / plain[batch]))
        rows.append(Row(f"{case}: weights", weights_mib(drafter), "MiB"))
        if target is not None:
            acceptance, length = answer_prompts(target, drafter, codec, pair_options.max_tokens)
            rows.append(Row(f"{case}: acceptance of a draft", acceptance, "share", bound=1.0))
            rows.append(Row(f"{case}: accepted length", length, "tokens", bound=5.0))
        del drafter
        print(
            f"{kind}: {', '.join(f'{row.value:.3f} {row.unit}' for row in rows if row.case.startswith(case))}",
            flush=True,
        )
    del target
    rows += auto_rows(PairOptions(options.dtype, options.threads, "auto").drafter(str(options.drafter)))
    report("quantization", rows)


def auto_rows(config: EngineConfig) -> list[Row]:
    """Return what `quantization: auto` measures here, the form it takes first."""
    times = step_times(config, CANDIDATES, step_ms)
    ordered = sorted(times, key=lambda kind: times[kind])
    return [Row(f"auto: {kind}{' (taken)' if kind == ordered[0] else ''}", times[kind], "ms") for kind in ordered]


def measured_step_ms(engine: Engine, batch: int) -> float:
    """Return the median milliseconds of a step of one new token for each of `batch` sequences."""
    length = min(CONTEXT_TOKENS, engine.context_length - 1)
    ids = token_ids([index % engine.vocabulary_size for index in range(length + 1)])
    for sequence in range(batch):
        engine.start(sequence)
        engine.forward([StepInput(sequence, 0, ids[:length], 1)])
    durations = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        engine.forward([StepInput(sequence, length, ids[length:], 1) for sequence in range(batch)]).cpu()
        durations.append((time.perf_counter() - began) * 1e3)
    engine.release(None)
    return statistics.median(durations[1:])


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
