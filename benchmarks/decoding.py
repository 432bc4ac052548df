"""What a round spends beside the models: warping, noise and verification for 8 sequences, a vocabulary of 152,000.

`make bench BENCH=decoding` (a minute), `QUICK=1` for half of it. Milliseconds are medians of rounds on one thread, one
round being 8 sequences of 4 drafts. With `ARGS="--target DIR"` a real model verifies such a round, on the same thread,
and its own logits are drawn from: `bound` is what its forward pass takes, `ratio` the share of it.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.acceptance_prompts import PROMPTS
from benchmarks.harness import Row, report
from deployments.text import TextCodec
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import PositionRun, SamplingRows, draw_tokens
from workers.decoding.verification import verify_chain
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.messages import LogitRules, SamplingParams, TokenIds

VOCABULARY = 152_000
SEQUENCES, DRAFT_TOKENS = 8, 4
HISTORY_TOKENS = 1_000
RULES = LogitRules(
    logit_bias=tuple((token, 1.5) for token in range(0, 3_000, 10)),
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.2,
)
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 1, top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "temperature 1, min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "temperature 0.7, top-p 0.9, top-k 50, min-p 0.05": SamplingParams(0.7, top_k=50, top_p=0.9, min_p=0.05),
    "the same with penalties, 300 biases, history of 1,000": SamplingParams(0.7, 50, 0.9, min_p=0.05, rules=RULES),
}


def peaked_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Return float32 [rows, V] like a language model's: normal, deviation 2.5, and 20 tokens that stand out per row.

    The likeliest is 22 above the mean, each further one 0.6 lower.
    """
    generator = np.random.default_rng(7)
    logits = generator.normal(0, 2.5, (rows, vocabulary)).astype(np.float32)
    for row in logits:
        few = min(20, vocabulary)
        row[generator.choice(vocabulary, few, replace=False)] = 22 - 0.6 * np.arange(few)
    return torch.from_numpy(logits)


def normal_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Return float32 [rows, V], normal with deviation 2.5: no token stands out, thousands are likely."""
    generator = np.random.default_rng(8)
    return torch.from_numpy(generator.normal(0, 2.5, (rows, vocabulary)).astype(np.float32))


def flat_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Return float32 [rows, V], all within 0.01: every token is about as likely."""
    generator = np.random.default_rng(9)
    return torch.from_numpy(generator.uniform(0, 0.01, (rows, vocabulary)).astype(np.float32))


KINDS = {"peaked": peaked_logits, "normal": normal_logits, "flat": flat_logits}


def draw_round(sampling: SamplingParams, logits: torch.Tensor, first_position: int) -> int:
    """Draw for sequences of DRAFT_TOKENS + 1 rows each, verify drafts that are all right, return how many are."""
    positions = DRAFT_TOKENS + 1
    compiled = CompiledRules.of(sampling.rules) if sampling.rules else None
    runs = []
    for sequence in range(len(logits) // positions):
        context = None
        if compiled:
            history = np.random.default_rng(sequence).integers(0, logits.shape[1], first_position + positions)
            context = RuleContext(compiled, history.astype(np.int32), prompt_tokens=first_position // 2)
        runs.append(PositionRun(sampling, first_position, positions, context))
    drawn = draw_tokens(logits, SamplingRows.of_runs(runs)).numpy().astype(np.int32).reshape(-1, positions)
    return sum(verify_chain(tokens, tokens[:-1]).accepted for tokens in drawn)


def _cost_ms(sampling: SamplingParams, logits: torch.Tensor, rounds: int) -> float:
    positions = iter(range(HISTORY_TOKENS, HISTORY_TOKENS + rounds + 1))
    return _median_ms(lambda: draw_round(sampling, logits, next(positions)), rounds)


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the median of `rounds` calls behind a first one that does not count."""
    spent = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        spent.append((time.perf_counter() - began) * 1e3)
    return median(spent[1:])


def measure(rounds: int) -> Iterator[Row]:
    """Yield a row per kind of logits and case; `ratio` is to reading the logits once, below which nothing can go."""
    for kind, make in KINDS.items():
        logits = make(SEQUENCES * (DRAFT_TOKENS + 1), VOCABULARY)
        once = _median_ms(lambda logits=logits: logits.amax(dim=-1), rounds)  # type: ignore[misc]
        yield Row(f"{kind}: all logits read once", once, "ms")
        for case, sampling in CASES.items():
            cost = _cost_ms(sampling, logits, rounds)
            yield Row(f"{kind}: {case}", cost, "ms per round", ratio=cost / once)


def measure_beside(target: Path, dtype: str, rounds: int) -> Iterator[Row]:
    """Yield a row per case, drawn from the logits of a verification by the model in the folder `target`."""
    config = EngineConfig(str(target), dtype, "cpu", kv_cache_gib=0.5, max_context_tokens=512, threads=1)
    engine, codec = Engine.load(config), TextCodec.load(str(target))
    texts = [text for kind in PROMPTS.values() for text in kind][:SEQUENCES]
    prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
    inputs, logits = _verification(engine, prompts)
    step = _median_ms(lambda: engine.forward(inputs), rounds)
    yield Row(f"{target.name}, {dtype}: one verification, {len(logits)} tokens", step, "ms")
    for case, sampling in CASES.items():
        cost = _cost_ms(sampling, logits, rounds)
        yield Row(f"{target.name}, {dtype}: {case}", cost, "ms per round", bound=step, ratio=cost / step)


def _verification(engine: Engine, prompts: list[TokenIds]) -> tuple[list[StepInput], torch.Tensor]:
    """Return the step that verifies the model's own greedy continuations of `prompts`, and its logits."""
    for number in range(len(prompts)):
        engine.start(number)
    tokens = prompts
    inputs = [StepInput(number, 0, prompt, logit_rows=1) for number, prompt in enumerate(prompts)]
    for _ in range(DRAFT_TOKENS + 1):
        drawn = engine.forward(inputs).argmax(dim=-1).tolist()
        tokens = [np.append(before, token).astype(np.int32) for before, token in zip(tokens, drawn, strict=True)]
        inputs = [StepInput(number, len(read) - 1, read[-1:], logit_rows=1) for number, read in enumerate(tokens)]
    rows = DRAFT_TOKENS + 1
    verifying = [
        StepInput(number, len(prompt), read[len(prompt) :], logit_rows=rows)
        for number, (prompt, read) in enumerate(zip(prompts, tokens, strict=True))
    ]
    return verifying, engine.forward(verifying)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 5 if options.quick else 25
    rows = list(measure(rounds))
    if options.target is not None:
        rows += measure_beside(options.target, options.dtype, rounds)
    report("decoding", rows)


if __name__ == "__main__":
    main()
