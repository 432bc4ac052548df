"""llguidance, which this project uses, against xgrammar, which it does not: compiling, masks, reading and rolling back.

`make bench BENCH=grammar_engines ARGS="--tokenizer FOLDER"`, after `pip install xgrammar`; the folder is a model's with
a tokenizer.json. One thread, both engines in one run, each through its own Python interface; wall times.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from benchmarks.grammar import BRANCHING, DRAFTS, PERSON, TEXT
from benchmarks.harness import Row, report

SCHEMAS: dict[str, object] = {"any object": {"type": "object"}, "six fields": PERSON, "100 fields": BRANCHING}


class Grammars(Protocol):
    """One engine with a tokenizer read."""

    def compile(self, schema: str) -> Any:
        """Return the grammar, compiled anew."""
        ...

    def walk(self, grammar: Any, ids: Sequence[int]) -> tuple[list[float], list[float], float]:
        """Follow a text: milliseconds of each mask, of each token read, and of rolling DRAFTS tokens back."""
        ...


class Llguidance:
    """See `Grammars`."""

    def __init__(self, tokenizer: TokenizersBackend, vocabulary: int) -> None:
        end = tokenizer.eos_token_id
        self._tokenizer = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocabulary, eos_token=end)
        self._mask = allocate_token_bitmask(1, vocabulary)

    def compile(self, schema: str) -> Any:
        """See `Grammars.compile`."""
        return LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)

    def walk(self, grammar: Any, ids: Sequence[int]) -> tuple[list[float], list[float], float]:
        """See `Grammars.walk`."""
        matcher = grammar.deep_copy()
        return walk(
            ids,
            lambda: fill_next_token_bitmask(matcher, self._mask, 0),
            matcher.consume_token,
            lambda: matcher.rollback(DRAFTS),
        )


class Xgrammar:
    """See `Grammars`."""

    def __init__(self, tokenizer: TokenizersBackend, vocabulary: int) -> None:
        self._engine: Any = importlib.import_module("xgrammar")
        self._tokenizer = self._engine.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self._mask = self._engine.allocate_token_bitmask(1, vocabulary)

    def compile(self, schema: str) -> Any:
        """See `Grammars.compile`."""
        compiler = self._engine.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)
        return compiler.compile_json_schema(schema, strict_mode=False)

    def walk(self, grammar: Any, ids: Sequence[int]) -> tuple[list[float], list[float], float]:
        """See `Grammars.walk`."""
        matcher = self._engine.GrammarMatcher(grammar)
        return walk(
            ids,
            lambda: matcher.fill_next_token_bitmask(self._mask),
            matcher.accept_token,
            lambda: matcher.rollback(DRAFTS),
        )


def walk(
    ids: Sequence[int], mask: Callable[[], Any], read: Callable[[int], Any], roll_back: Callable[[], Any]
) -> tuple[list[float], list[float], float]:
    """Time a mask before each token, reading it, and one rollback at the end."""
    masks, reads = [], []
    for token in ids:
        masks.append(took_ms(mask))
        reads.append(took_ms(lambda token=token: read(token)))  # type: ignore[misc]
    return masks, reads, took_ms(roll_back)


def took_ms(work: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def measure(name: str, make: Callable[[], Grammars], ids: Sequence[int], repetitions: int) -> list[Row]:
    """Return the rows of one engine."""
    began = time.perf_counter()
    grammars = make()
    rows = [Row(f"{name}: reading the tokenizer", (time.perf_counter() - began) * 1e3, "ms")]
    for title, schema in SCHEMAS.items():
        text = json.dumps(schema)
        times = [took_ms(lambda text=text: grammars.compile(text)) for _ in range(repetitions)]  # type: ignore[misc]
        rows.append(Row(f"{name}: compiling {title}", median(times), "ms"))
    grammar = grammars.compile(json.dumps(PERSON))
    walks = [grammars.walk(grammar, ids) for _ in range(repetitions + 1)][1:]
    masks = [ms for each, _, _ in walks for ms in each]
    rows.append(Row(f"{name}: mask along six fields, median", median(masks) * 1e3, "µs"))
    rows.append(Row(f"{name}: mask along six fields, 95 %", float(np.quantile(masks, 0.95)) * 1e3, "µs"))
    rows.append(Row(f"{name}: reading a token", median(ms for _, each, _ in walks for ms in each) * 1e3, "µs"))
    rows.append(Row(f"{name}: rolling {DRAFTS} back", median(each for _, _, each in walks) * 1e3, "µs"))
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    tokenizer: TokenizersBackend = TokenizersBackend.from_pretrained(options.tokenizer)
    vocabulary = max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    ids = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    rows: list[Row] = []
    for engine in (Llguidance, Xgrammar):
        name = f"{engine.__name__.lower()}, V = {vocabulary:,}"
        rows += measure(name, lambda engine=engine: engine(tokenizer, vocabulary), ids, 1 if options.quick else 5)  # type: ignore[misc]
    report("grammar_engines", rows)


if __name__ == "__main__":
    main()
