"""Which tokens a grammar allows behind an output, as a bit for each id. llguidance parses; what it needs is here.

A mask is a function of the output alone. The parser's state is only a cache: it is led, by rolling back and reading on,
to whatever output is asked about, be it committed, along a chain or on a branch of a tree.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from workers.errors import GrammarError
from workers.messages import NO_TOKENS, Grammar, GrammarKind, TokenIds

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

AllowedBits: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [(V + 7) // 8]: token id v is bit v % 8 of byte v // 8."""

REMEMBERED_GRAMMARS = 64
# The parser's automaton of a multiple has as many states, and nothing in it bounds the time that they take.
MAX_MULTIPLE = 10_000
MAX_REASON_CHARACTERS = 200
_MAY_END = "<|the text may end here|>"


class GrammarCompiler:
    """Compiles grammars for one tokenizer and remembers the last ones. To be called by one thread at a time.

    `read_tokenizer` returns the content of tokenizer.json, or None; it is called when the first grammar comes.
    """

    def __init__(self, read_tokenizer: Callable[[], str | None]) -> None:
        self._read_tokenizer = read_tokenizer
        self.compile = lru_cache(REMEMBERED_GRAMMARS)(self._compile)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        """The parser's view of the vocabulary. A token of our own says "the text may end here".

        Which ids end a text is the request's affair; and a tokenizer does not say which of its tokens do.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise GrammarError("structured output needs the package llguidance, which is not installed") from error
        from tokenizers import Tokenizer

        content = self._read_tokenizer()
        if content is None:
            raise GrammarError("the model has no tokenizer.json")
        tokenizer = Tokenizer.from_str(content)
        tokenizer.add_special_tokens([_MAY_END])
        try:
            return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(_MAY_END))
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer is of an unknown kind: {_one_line(str(error))}") from error

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Return the grammar ready for use. Raises GrammarError, which says what is wrong with it."""
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        # The parser's own limits on size and effort hold; errors that quote its state would be long.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _for_parser(grammar), log_level=0, limits=limits)
        matcher.compute_bitmask()  # some mistakes show only here
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        return CompiledGrammar(matcher, tokenizer.eos_token)


class CompiledGrammar:
    """A parser that has read nothing, to be copied. `may_end` is the id that says where a text may end."""

    def __init__(self, matcher: "LLMatcher", may_end: int) -> None:
        self._matcher = matcher
        self.may_end = may_end

    def matcher(self) -> "LLMatcher":
        """Return a fresh parser."""
        return self._matcher.deep_copy()


class GrammarMasks:
    """The masks of one sequence. Its outputs may be asked about in any order."""

    def __init__(self, compiled: CompiledGrammar, end_ids: Iterable[int], vocabulary_size: int) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher()
        self._consumed = NO_TOKENS
        # The last entry stands for ids beyond the vocabulary, padding of the embedding, which a draft might hold.
        self._is_end = np.zeros(vocabulary_size + 1, dtype=bool)
        self._is_end[list(end_ids)] = True
        self._ends: AllowedBits = np.packbits(self._is_end[:-1], bitorder="little")

    def allowed_after(self, output: TokenIds, hold_back_ends: bool = False) -> AllowedBits:
        """Return the ids that may follow `output`, which does not hold the prompt.

        End ids may follow where the text may end; with `hold_back_ends` only where it must, and behind an end id.
        Nothing may follow an output that breaks the grammar, nor one that is too hard to parse.
        """
        ends = np.flatnonzero(self._is_end[np.minimum(output, len(self._is_end) - 1)])
        text = output[: ends[0]] if len(ends) else output
        nothing = np.zeros_like(self._ends)
        if not self._lead_to(text):
            return nothing
        content, may_end = self._continuations()
        if len(ends):
            return self._ends if may_end else nothing
        if may_end and not (hold_back_ends and content.any()):
            content |= self._ends
        return content

    def _continuations(self) -> tuple[AllowedBits, bool]:
        """Return which ids that end nothing may follow, and whether the text may end."""
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            found = np.zeros_like(found)
        byte, bit = divmod(self._compiled.may_end, 8)
        may_end = bool(found[byte] >> bit & 1)
        content = np.zeros_like(self._ends)
        width = min(len(content), len(found))
        content[:width] = found[:width] & ~self._ends[:width]
        if byte < len(content):
            content[byte] &= ~np.uint8(1 << bit)
        return content, may_end

    def _lead_to(self, text: TokenIds) -> bool:
        """Make the parser's state that behind `text`; return False if `text` breaks the grammar.

        The state is compared with `text` each time, so that no rollback elsewhere can leave it wrong.
        """
        known = min(len(self._consumed), len(text))
        differing = np.flatnonzero(self._consumed[:known] != text[:known])
        common = int(differing[0]) if len(differing) else known
        if self._matcher.is_error() or not self._matcher.rollback(len(self._consumed) - common):
            self._matcher, common = self._compiled.matcher(), 0
        read = self._matcher.try_consume_tokens(text[common:].tolist())
        self._consumed = text[: common + read].copy()
        return len(self._consumed) == len(text) and not self._matcher.is_error()


def _for_parser(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.source)
    try:
        schema = json.loads(grammar.source)
        multiple = math.lcm(*map(_whole, _multiples(schema)))
        if multiple > MAX_MULTIPLE:
            raise GrammarError(f"multipleOf: all of them together exceed {MAX_MULTIPLE}")
        # A schema may carry options of the parser; none may make it ignore what it does not know.
        return LLMatcher.grammar_from_json_schema(grammar.source, overrides={"lenient": False, "coerce_one_of": False})
    except (ValueError, RecursionError) as error:
        raise GrammarError(_one_line(str(error))) from error


def _multiples(schema: object) -> Iterator[float]:
    """Yield every number under a key `multipleOf`. Where several apply at once, their automata multiply."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "multipleOf" and isinstance(value, int | float) and 0 < value < math.inf:
                yield value
            yield from _multiples(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _multiples(value)


def _whole(number: float) -> int:
    """Return the number without its decimal point: 0.25 -> 25."""
    exact = Decimal(repr(number))
    exponent = exact.as_tuple().exponent
    return int(exact.scaleb(-exponent)) if isinstance(exponent, int) and exponent < 0 else int(exact)


def _one_line(reason: str) -> str:
    """Return the part of an error of the parser, which may draw pictures, that says what is wrong."""
    found = re.search(r"^error: (.+)$", reason, re.MULTILINE)
    line = found[1] if found else next(iter(reason.strip().splitlines()), "unknown")
    return line[:MAX_REASON_CHARACTERS]
