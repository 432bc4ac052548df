"""The engine's step against bare transformers forwards with a DynamicCache for the same new tokens, turn by turn.

`make bench BENCH=engine ARGS="--target DIR"` takes any causal model; left out, the embedded target, whose step is so
short that Python's share shows. `QUICK=1` measures fewer rounds. Ratios are medians over rounds in which both ran.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.harness import ROOT, Row, report
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.messages import TokenIds

NEW_TOKENS = 5
CONTEXT = 500
RAGGED = (100, 300, 500, 700, 900, 1100, 1300, 1500)
TINY_RAGGED = (20, 50, 80, 110, 140, 170, 200, 230)


class Bare:
    """The unmodified model, one sequence at a time, each with its own cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._caches: dict[int, Any] = {}

    def read(self, context: TokenIds) -> None:
        """Cache a sequence that is known by its length."""
        cache = DynamicCache(config=self._model.config)
        self._forward(context, cache)
        self._caches[len(context)] = cache

    def step(self, context: int, new: TokenIds) -> None:
        """Read `new` behind the sequence of `context` tokens, and forget it again."""
        cache = self._caches[context]
        self._forward(new, cache)
        cache.crop(-len(new))

    @torch.inference_mode()
    def _forward(self, tokens: TokenIds, cache: Any) -> None:
        self._model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], past_key_values=cache, use_cache=True)


def tokens_of(count: int, vocabulary: int) -> TokenIds:
    """Return some ids."""
    return np.random.default_rng(count).integers(0, vocabulary, count).astype(np.int32)


def turns(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Return the medians of both in milliseconds, and the median of their quotients, after a first round."""
    times = [(_ms(ours), _ms(theirs)) for _ in range(rounds + 1)][1:]
    return median(one for one, _ in times), median(other for _, other in times), median(a / b for a, b in times)


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def measure(folder: Path, dtype: str, context: int, ragged: Sequence[int], rounds: int) -> list[Row]:
    """Return a row per shape of step; `bound` is the bare forward."""
    longest = max(context, *ragged) + 64
    engine = Engine.load(EngineConfig(str(folder), dtype, "cpu", 1.0, max_context_tokens=longest, threads=1))
    bare, vocabulary = Bare(folder, dtype), engine.vocabulary_size
    lengths = sorted({context, *ragged})
    for length in lengths:
        read = tokens_of(length, vocabulary)
        bare.read(read)
        engine.start(length)
        engine.forward([StepInput(length, 0, read, logit_rows=1)])
    new, many = tokens_of(NEW_TOKENS, vocabulary), tokens_of(NEW_TOKENS * len(ragged), vocabulary)

    def step(chosen: Sequence[int]) -> None:
        engine.forward([StepInput(length, length, new, logit_rows=NEW_TOKENS) for length in chosen])

    def singly() -> None:
        for length in ragged:
            bare.step(length, new)

    name = f"{folder.name}, {dtype}"
    cases = {
        f"{name}: 1 sequence x {NEW_TOKENS} tokens, context {context}": (
            lambda: step([context]),
            lambda: bare.step(context, new),
        ),
        f"{name}: {len(ragged)} ragged x {NEW_TOKENS}, against one forward of {len(many)} tokens": (
            lambda: step(ragged),
            lambda: bare.step(context, many),
        ),
        f"{name}: {len(ragged)} ragged x {NEW_TOKENS}, against {len(ragged)} forwards": (lambda: step(ragged), singly),
    }
    rows = []
    for case, (ours, theirs) in cases.items():
        one, other, ratio = turns(ours, theirs, rounds)
        rows.append(Row(case, one, "ms per step", bound=other, ratio=ratio))
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 5 if options.quick else 15
    if options.target is None:
        rows = measure(ROOT / "models" / "tiny-code" / "target", "float32", 128, TINY_RAGGED, rounds)
    else:
        rows = measure(options.target, options.dtype, CONTEXT, RAGGED, rounds)
    report("engine", rows)


if __name__ == "__main__":
    main()
