"""What structured output costs: compiling a grammar, the mask of a position, rolling back, masking a row of logits.

`make bench BENCH=grammar`, `QUICK=1` for fewer repetitions. `ARGS="--tokenizer path/to/tokenizer.json"` adds the rows
of another vocabulary to those of the embedded pair. One thread, no model.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from tokenizers import Tokenizer

from benchmarks.harness import ROOT, Row, report
from workers.decoding.grammar import CompiledGrammar, GrammarCompiler, GrammarMasks
from workers.decoding.logit_edits import LogitEdits, RuledRun
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.messages import Grammar, GrammarKind, LogitRules, TokenIds, token_ids

END = 0
DRAFTS = 4
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": ADDRESS,
    },
    "required": ["name", "age", "email", "kind", "tags", "address"],
    "additionalProperties": False,
}
BRANCHING = {
    "type": "object",
    "properties": {
        f"field_{index}": {
            "anyOf": [
                {"type": "string", "maxLength": 200 + index},
                {"type": "number"},
                {"type": "array", "items": PERSON},
            ]
        }
        for index in range(100)
    },
    "required": [f"field_{index}" for index in range(100)],
    "additionalProperties": False,
}
TEXT = json.dumps(
    {
        "name": "Ada Lovelace, Countess",
        "age": 36,
        "email": "ada@example.com",
        "kind": "green",
        "tags": ["maths", "a longer tag"],
        "address": {"street": "St James's Square 12, London", "zip": "12345"},
    }
)


def schema(value: object) -> Grammar:
    """A grammar of JSON for a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


COMPILED = {"any object": schema({"type": "object"}), "six fields": schema(PERSON), "100 fields": schema(BRANCHING)}


def took_ms(work: Callable[..., object], *arguments: object) -> float:
    """Return the processor time of one call, which a busy machine disturbs less than a clock."""
    began = time.thread_time()
    work(*arguments)
    return (time.thread_time() - began) * 1e3


def compile_rows(name: str, content: str, repetitions: int) -> list[Row]:
    """Reading the tokenizer, once per process, and compiling, once per grammar and process."""
    compiler = GrammarCompiler(lambda: content)
    with_tokenizer, without = (took_ms(compiler.compile, Grammar(GrammarKind.REGEX, source)) for source in "ab")
    rows = [Row(f"{name}: reading the tokenizer", with_tokenizer - without, "ms")]
    for title, grammar in COMPILED.items():
        # The function underneath does not remember.
        found = median(took_ms(compiler._compile, grammar) for _ in range(repetitions))
        rows.append(Row(f"{name}: compiling {title}", found, "ms"))
    return rows


def mask_rows(name: str, tokenizer: Tokenizer, content: str, repetitions: int) -> list[Row]:
    """Walking along a text: a mask per position, and what a rejected proposal costs."""
    output, size = token_ids(tokenizer.encode(TEXT, add_special_tokens=False).ids), tokenizer.get_vocab_size()
    compiled = GrammarCompiler(lambda: content).compile(schema(PERSON))
    masks: list[float] = []
    rejections: list[float] = []
    for _ in range(repetitions):
        sequence = GrammarMasks(compiled, [END], size)
        for position in range(len(output) - DRAFTS):
            masks.append(took_ms(sequence.allowed_after, output[:position]))
            sequence.allowed_after(output[: position + DRAFTS])
            rejections.append(took_ms(sequence.allowed_after, output[:position]))
    verifications = [verification_ms(compiled, output, size) for _ in range(20 * repetitions)]
    return [
        Row(f"{name}: mask of the next position, median", median(masks) * 1e3, "µs"),
        Row(f"{name}: mask of the next position, 95 %", quantiles(masks, n=20)[-1] * 1e3, "µs"),
        Row(f"{name}: rolling {DRAFTS} back and a mask, median", median(rejections) * 1e3, "µs"),
        Row(f"{name}: {DRAFTS + 1} rows of logits, masks included", median(verifications) * 1e3, "µs"),
    ]


def verification_ms(compiled: CompiledGrammar, output: TokenIds, size: int) -> float:
    """Masking the logits of a whole proposal in the middle of the text, and putting them back."""
    masks, middle = GrammarMasks(compiled, [END], size), len(output) // 2
    masks.allowed_after(output[:middle])
    context = RuleContext(CompiledRules.of(LogitRules()), output, 0, masks)
    logits = torch.zeros(DRAFTS + 1, size)

    def verify() -> None:
        with LogitEdits.of_runs([RuledRun(0, range(middle, middle + DRAFTS + 1), context)]).applied_to(logits):
            pass

    return took_ms(verify)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokenizer", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repetitions = 3 if arguments.quick else 15
    rows: list[Row] = []
    for path in [ROOT / "models/tiny-code/target/tokenizer.json", *arguments.tokenizer]:
        content = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(content)
        name = f"V = {tokenizer.get_vocab_size():,}"
        rows += compile_rows(name, content, repetitions) + mask_rows(name, tokenizer, content, repetitions)
    report("grammar", rows)


if __name__ == "__main__":
    main()
