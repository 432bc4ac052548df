"""What a round spends beside the models: warping, noise and verification for 8 sequences, a vocabulary of 152,000.

`make bench BENCH=decoding` (a minute), `QUICK=1` for half of it. Milliseconds are medians of rounds on one thread, one
round being 8 sequences of 4 drafts. `round_cost_ms` gives one such number, for benchmarks that know what a step takes.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch

from benchmarks.harness import Row, report
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import PositionRun, SamplingRows, draw_tokens
from workers.decoding.verification import verify_chain
from workers.messages import LogitRules, SamplingParams

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


def round_cost_ms(case: str, rows: int, vocabulary: int, rounds: int = 5) -> float:
    """Return the milliseconds of one round of `CASES[case]`, peaked logits, `rows` a multiple of DRAFT_TOKENS + 1."""
    return _cost_ms(CASES[case], peaked_logits(rows, vocabulary), rounds)


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


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    report("decoding", list(measure(rounds=5 if quick else 25)))


if __name__ == "__main__":
    main()
