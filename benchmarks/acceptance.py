"""How many drafts a pair accepts, coupled and by ratio, at several temperatures and for several kinds of text.

`make bench BENCH=acceptance ARGS="--target DIR --drafter DIR"` runs any pair of one tokenizer in this process, without
Ray; left out, the embedded pair, whose prompts are code alone. `QUICK=1` asks fewer prompts for fewer tokens.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.acceptance_prompts import PROMPTS
from benchmarks.harness import ROOT, Row, report
from deployments.in_process import answer_all
from deployments.text import TextCodec
from models.corpus import held_out_prompts
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.messages import (
    GenerationRequest,
    SamplingParams,
    SpeculationUsage,
    StopConditions,
    TokenIds,
    Verification,
)
from workers.router.config import RouterConfig

TEMPERATURES = (0.0, 0.7, 1.0)
DRAFT_TOKENS = 4
TINY = ROOT / "models" / "tiny-code"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt and the kind of text it belongs to."""

    kind: str
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Pair:
    """The two engines, and what their text is made of."""

    target: Engine
    drafter: Engine
    codec: TextCodec


def load_pair(target: Path, drafter: Path, dtype: str, threads: int | None) -> Pair:
    """Load both models on the CPU, with pools for a batch of all prompts."""

    def load(folder: Path) -> Engine:
        config = EngineConfig(str(folder), dtype, "cpu", kv_cache_gib=1.0, max_context_tokens=1024, threads=threads)
        return Engine.load(config)

    return Pair(load(target), load(drafter), TextCodec.load(str(target)))


def encode(codec: TextCodec, quick: bool, tiny: bool) -> list[Prompt]:
    """Return the prompts: conversations for a real model, code to continue for the embedded one."""
    if tiny:
        return [Prompt("code", codec.encode(text)) for text in held_out_prompts(8 if quick else 24)]
    chosen = [(kind, text) for kind, texts in PROMPTS.items() for text in (texts[:2] if quick else texts)]
    return [Prompt(kind, codec.encode_chat([{"role": "user", "content": text}])) for kind, text in chosen]


def generate(
    pair: Pair, prompts: Sequence[Prompt], temperature: float, verification: Verification, max_tokens: int
) -> list[SpeculationUsage]:
    """Answer all prompts at once, EOS ignored, and return what speculation did for each."""
    config = RouterConfig(DRAFT_TOKENS, verification, propose_deadline_s=600.0, verify_deadline_s=600.0)
    requests = [
        GenerationRequest(
            str(index),
            prompt.token_ids,
            SamplingParams(temperature=temperature, seed=index),
            StopConditions(max_tokens),
            timeout_s=36_000,
        )
        for index, prompt in enumerate(prompts)
    ]
    return asyncio.run(answer_all(pair.target, pair.drafter, pair.codec, config, requests))


def rows_of(case: str, prompts: Sequence[Prompt], usages: Sequence[SpeculationUsage]) -> list[Row]:
    """Return acceptance rate and accepted length over all prompts, and the rate for each kind of text."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    rows = [Row(f"{case}: accepted length", _accepted_length(usages), "tokens", bound=DRAFT_TOKENS + 1.0)]
    rows.append(Row(f"{case}: acceptance rate", _acceptance_rate(usages), "share", bound=1.0))
    for kind in kinds if len(kinds) > 1 else []:
        chosen = [usage for usage, prompt in zip(usages, prompts, strict=True) if prompt.kind == kind]
        rows.append(Row(f"{case}, {kind}: acceptance rate", _acceptance_rate(chosen), "share", bound=1.0))
    return rows


def _acceptance_rate(usages: Sequence[SpeculationUsage]) -> float:
    return sum(usage.accepted_tokens for usage in usages) / sum(usage.draft_tokens for usage in usages)


def _accepted_length(usages: Sequence[SpeculationUsage]) -> float:
    return sum(usage.committed_tokens for usage in usages) / sum(usage.verifications for usage in usages)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--drafter", type=Path, default=TINY / "draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    pair = load_pair(options.target, options.drafter, options.dtype, options.threads)
    prompts = encode(pair.codec, options.quick, tiny=options.target == TINY / "target")
    rows = []
    for temperature in TEMPERATURES:
        for verification in Verification:
            max_tokens = 32 if options.quick else 64
            usages = generate(pair, prompts, temperature, verification, max_tokens)
            name = "tiny-code" if options.target == TINY / "target" else options.target.name
            case = f"{name}, {len(prompts)} prompts, temperature {temperature:g}, {verification}"
            rows += rows_of(case, prompts, usages)
            print(f"{case}: {_acceptance_rate(usages):.3f} accepted", flush=True)
    report("acceptance", rows)


if __name__ == "__main__":
    main()
