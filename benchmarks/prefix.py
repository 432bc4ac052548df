"""How much sooner the first token comes when the beginning of a prompt is cached.

`make bench BENCH=prefix ARGS="--target DIR --drafter DIR"` runs any pair of one tokenizer in this process, without Ray;
left out, the embedded pair. Each trial asks for one token twice, with prompts that share a prefix nobody asked for
before and end differently; `QUICK=1` makes fewer trials.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT, Row, report
from deployments.in_process import registration
from deployments.text import TextCodec
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.emulated.thread_link import ThreadLink
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    GenerationFailed,
    GenerationRequest,
    SamplingParams,
    StopConditions,
    TokenIds,
    WorkerRole,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

TINY = ROOT / "models" / "tiny-code"
SUFFIX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """Milliseconds to the first token: of a new prompt, and of one that begins like it."""

    first_ms: float
    second_ms: float


async def first_token_ms(router: Router, prompt: TokenIds) -> float:
    """Ask for two tokens, so that the drafter takes part; return when the first came."""
    asked = GenerationRequest("prefix", prompt, SamplingParams(temperature=0), StopConditions(2), timeout_s=3600.0)
    began = time.perf_counter()
    elapsed_ms = None
    async for event in router.generate(asked):
        if isinstance(event, GenerationFailed):
            raise RuntimeError(event.message)
        if elapsed_ms is None and len(event.token_ids):
            elapsed_ms = (time.perf_counter() - began) * 1e3
    if elapsed_ms is None:
        raise RuntimeError("a generation ended without a token")
    return elapsed_ms


async def run_trials(target: Engine, drafter: Engine, codec: TextCodec, prefix_tokens: int, trials: int) -> list[Trial]:
    """Return the trials, after one that warms everything up and is not counted."""
    config = RouterConfig(propose_deadline_s=3600.0, verify_deadline_s=3600.0)
    router = Router(config, lambda prompt: IncrementalDetokenizer(codec.backend, prompt.tolist()))
    links = ThreadLink(Verifier(target)), ThreadLink(ModelDrafter(drafter))
    for role, engine, link in zip((WorkerRole.TARGET, WorkerRole.DRAFT), (target, drafter), links, strict=True):
        await router.register(registration(role, engine), link)
    random = np.random.default_rng(0)
    done = []
    for _ in range(trials + 1):
        prefix, *suffixes = (
            token_ids(random.integers(0, target.vocabulary_size, size).tolist())
            for size in (prefix_tokens, SUFFIX_TOKENS, SUFFIX_TOKENS)
        )
        done.append(Trial(*[await first_token_ms(router, np.concatenate([prefix, suffix])) for suffix in suffixes]))
    await router.close()
    for link in links:
        await asyncio.to_thread(link.close)
    return done[1:]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--drafter", type=Path, default=TINY / "draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-context-tokens", type=int, help="for models whose context does not fit the pool")
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    options = parser.parse_args()
    rows = []
    name = "tiny-code" if options.target == TINY / "target" else options.target.name
    codec = TextCodec.load(str(options.target))
    for caching in (True, False):
        target, drafter = (
            Engine.load(
                EngineConfig(
                    str(folder),
                    options.dtype,
                    "cpu",
                    0.5,
                    threads=options.threads,
                    prefix_caching=caching,
                    max_context_tokens=options.max_context_tokens,
                )
            )
            for folder in (options.target, options.drafter)
        )
        # The context has to hold prefix, suffix and the tokens asked for.
        prefix_tokens = min(options.prefix_tokens, target.context_length - SUFFIX_TOKENS - 2)
        trials = asyncio.run(run_trials(target, drafter, codec, prefix_tokens, 5 if options.quick else 20))
        first, second = (
            statistics.median(getattr(trial, which) for trial in trials) for which in ("first_ms", "second_ms")
        )
        case = f"{name}, {prefix_tokens} tokens shared, prefix caching {'on' if caching else 'off'}"
        rows.append(Row(f"{case}: first token of a new prompt", first, "ms"))
        rows.append(Row(f"{case}: first token of the next one", second, "ms"))
        # No less can be read than what is behind the shared blocks.
        found = prefix_tokens // target.block_tokens * target.block_tokens if caching else 0
        unread = 1 - found / (prefix_tokens + SUFFIX_TOKENS)
        share = statistics.median(trial.second_ms / trial.first_ms for trial in trials)
        rows.append(Row(f"{case}: the next one's share", share, "share", unread, share / unread))
    report("prefix", rows)


if __name__ == "__main__":
    main()
