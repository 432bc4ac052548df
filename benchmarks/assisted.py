"""A real pair through HTTP against transformers: plain and assisted generation, code and prose, one and four at a time.

`make bench BENCH=assisted ARGS="--target DIR --drafter DIR"`. All arms answer greedily and take turns, prompt by prompt
where they answer one at a time, as a machine's speed drifts; a speed is the harmonic mean of those of its turns.
Transformers generates for one prompt at a time, as assisted generation does not batch; its speed at concurrency 4 is
that of one. At concurrency 4 three times as many prompts are asked, so that others follow those that end first.
`--draft-threads` and `--target-threads` are those of the service's workers, `--threads` of transformers.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.acceptance_prompts import PROMPTS
from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.load import GREEDY, completion_body, run_load

Arm = Callable[[list[str], int], float]
"""Completes prompts with so many tokens each; returns tokens per second."""
KINDS = ("code", "prose")
CONCURRENCY = (1, 4)
PROMPTS_OF_MANY = 3


@dataclass(frozen=True, slots=True)
class Transformers:
    """The pair in this process, as anybody would load it."""

    tokenizer: Any
    target: Any
    drafter: Any

    @classmethod
    def load(cls, target: Path, drafter: Path) -> "Transformers":
        """Load both in bfloat16."""
        models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in (target, drafter)]
        return cls(AutoTokenizer.from_pretrained(target), *models)

    def prompts(self, kind: str, count: int) -> list[str]:
        """Return questions as the model's chat template writes them."""
        chosen = itertools.islice(itertools.cycle(PROMPTS[kind]), count)
        chats = [[{"role": "user", "content": question}] for question in chosen]
        return [self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def tokens_per_s(self, assisted: bool, prompts: list[str], max_tokens: int) -> float:
        """Complete one prompt after the other."""
        tokens, began = 0, time.perf_counter()
        options = {"assistant_model": self.drafter} if assisted else {}
        for prompt in prompts:
            inputs = self.tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                output = self.target.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, **options)
            tokens += output.shape[1] - inputs["input_ids"].shape[1]
        return tokens / (time.perf_counter() - began)


def service_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the service's configuration. The same prompts come again, so prefixes are not kept."""
    common = {"dtype": "bfloat16", "max_context_tokens": 1024, "prefix_caching": False}
    target = {"name": "target", "model": str(options.target), "threads": options.target_threads}
    drafter = {"model": str(options.drafter), "threads": options.draft_threads, "quantization": options.quantization}
    return tiny_pair_config(
        target=common | target,
        drafters=common | drafter,
        speculation={"max_draft_tokens": 8, "draft_ahead": options.draft_ahead},
    )


def service_arm(service: Service, speculation: bool, concurrency: int) -> Arm:
    """Return an arm that asks the service."""

    def run(prompts: list[str], max_tokens: int) -> float:
        bodies = [completion_body(prompt, GREEDY, speculation, max_tokens) for prompt in prompts]
        return run_load(service, bodies, concurrency).tokens_per_s

    return run


def measure(service: Service, peer: Transformers, options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for both kinds of prompts and both concurrencies."""
    for kind in KINDS:
        prompts = peer.prompts(kind, PROMPTS_OF_MANY * options.prompts)
        arms: dict[str, Arm] = {
            "transformers, plain": lambda chosen, tokens: peer.tokens_per_s(False, chosen, tokens),
            "transformers, assisted": lambda chosen, tokens: peer.tokens_per_s(True, chosen, tokens),
        }
        for concurrency in CONCURRENCY:
            arms[f"k = 0, concurrency {concurrency}"] = service_arm(service, False, concurrency)
            arms[f"speculation, concurrency {concurrency}"] = service_arm(service, True, concurrency)
        yield from _rows(kind, dict(take_turns(kind, arms, prompts, options)))


def take_turns(
    kind: str, arms: dict[str, Arm], prompts: list[str], options: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Yield the speed of each arm: those that ask one prompt at a time ask each in turn, the others all of them."""
    together = {name for name in arms if name.endswith(f"concurrency {CONCURRENCY[-1]}")}
    turns = [(name, [prompt]) for prompt in prompts[: options.prompts] for name in arms if name not in together]
    turns += [(name, prompts) for name in arms if name in together]
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for name, asked in turns * options.repeats:
        speeds[name].append(arms[name](asked, options.max_tokens))
        print(f"{kind}, {name}: {speeds[name][-1]:.2f} tokens/s", flush=True)
    yield from ((name, harmonic_mean(values)) for name, values in speeds.items())


def _rows(kind: str, speeds: dict[str, float]) -> Iterator[Row]:
    for name, speed in speeds.items():
        yield Row(f"{kind}: {name}", speed, "tokens/s")
    assisted, drafted = speeds["transformers, assisted"], speeds["speculation, concurrency 1"]
    yield Row(f"{kind}: speculation / assisted, concurrency 1", drafted, "tokens/s", assisted, drafted / assisted)
    for concurrency in CONCURRENCY:
        plain, drafted = (speeds[f"{arm}, concurrency {concurrency}"] for arm in ("k = 0", "speculation"))
        yield Row(
            f"{kind}: speculation / k = 0, concurrency {concurrency}", drafted, "tokens/s", plain, drafted / plain
        )


def main() -> None:
    """Run the benchmark."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--target-threads", type=int, default=cores)
    # A drafter has one CPU unless its configuration says otherwise.
    parser.add_argument("--draft-threads", type=int, default=1)
    parser.add_argument("--quantization", default="none", help="of the service's drafter")
    parser.add_argument("--draft-ahead", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    torch.set_num_threads(options.threads)
    peer = Transformers.load(options.target, options.drafter)
    with running_service(service_config(options)) as service:
        for speculation in (False, True):
            service_arm(service, speculation, CONCURRENCY[-1])(peer.prompts("code", 4), 8)
        report("assisted", list(measure(service, peer, options)))


if __name__ == "__main__":
    main()
