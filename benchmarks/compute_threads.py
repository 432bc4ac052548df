"""How OpenMP's threads should wait: steps of a target alone, and beside a drafter that computes on the same cores.

`make bench BENCH=compute_threads ARGS="--target DIR --drafter DIR"`, for a machine without GPUs. Ways take turns, each
in processes of its own; ratios are to the way of the workers, in the same turn.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness import ROOT, Row, report
from workers.compute_threads import in_own_thread, wait_briefly

SEQUENCES = 4
CONTEXT = 100
WORKERS_WAY = "as the workers do"
WAYS: dict[str, dict[str, str]] = {
    WORKERS_WAY: {},
    "loaded in a thread that stays": {"LEADOUT_BENCHMARK_LOADER_STAYS": "1"},
    "spinning for milliseconds, GNU's default": {"GOMP_SPINCOUNT": "300000"},
    "sleeping at once": {"OMP_WAIT_POLICY": "passive"},
}


def step_ms(folder: str, threads: int, seconds: float) -> float:
    """Load a model as a worker does, and return the median time of steps of one token for each sequence."""
    wait_briefly()
    # Imported here: OpenMP reads the environment when torch is.
    import numpy as np

    from workers.engine.config import EngineConfig
    from workers.engine.engine import Engine
    from workers.engine.step import StepInput

    config = EngineConfig(folder, "bfloat16", "cpu", 0.25, max_context_tokens=2 * CONTEXT, threads=threads)

    def load() -> Engine:
        engine = Engine.load(config)
        for number in range(SEQUENCES):
            engine.start(number)
            engine.forward([StepInput(number, 0, np.arange(CONTEXT, dtype=np.int32), logit_rows=1)])
        return engine

    engine = load() if "LEADOUT_BENCHMARK_LOADER_STAYS" in os.environ else in_own_thread(load)
    new, times = np.array([7], np.int32), []

    def steps() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            engine.forward([StepInput(number, CONTEXT, new, logit_rows=1) for number in range(SEQUENCES)])
            times.append((time.perf_counter() - began) * 1e3)

    in_own_thread(steps)
    return median(times)


def begin(way: str, folder: Path, threads: int, seconds: float) -> "subprocess.Popen[str]":
    """Start a process that measures and prints its steps' time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-m", "benchmarks.compute_threads", "--steps-of", str(folder)]
    command += ["--threads", str(threads), "--seconds", str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, env=kept | WAYS[way], stdout=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> float:
    """Wait for what `begin` began; RuntimeError if it failed."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process that measures ended with {process.returncode}")
    return float(json.loads(output.splitlines()[-1]))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for all ways."""
    cases = ("alone", "beside the drafter")
    seen: dict[tuple[str, str], list[float]] = {(way, case): [] for way in WAYS for case in cases}
    for _ in range(options.repeats):
        for way in WAYS:
            seen[way, cases[0]].append(result(begin(way, options.target, options.threads, options.seconds)))
            # The drafter goes on until the target has been measured, however long that takes to load.
            drafter = begin(way, options.drafter, options.threads, 4 * options.seconds)
            seen[way, cases[1]].append(result(begin(way, options.target, options.threads, options.seconds)))
            result(drafter)
            print(f"{way}: {', '.join(f'{case} {seen[way, case][-1]:.0f} ms' for case in cases)}", flush=True)
    for case in cases:
        for way in WAYS:
            ratios = [a / b for a, b in zip(seen[way, case], seen[WORKERS_WAY, case], strict=True)]
            yield Row(f"{case}: {way}", median(seen[way, case]), "ms per step", ratio=median(ratios))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--steps-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps_of:
        print(json.dumps(step_ms(options.steps_of, options.threads, options.seconds)))
        return
    if options.target is None or options.drafter is None:
        parser.error("--target and --drafter must name folders of models")
    options.repeats = options.repeats or (1 if options.quick else 3)
    report("compute_threads", list(measure(options)))


if __name__ == "__main__":
    main()
