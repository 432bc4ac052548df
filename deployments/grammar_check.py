"""Compiles what structured output is asked for before any work begins, so that a bad one is a refusal."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from workers.decoding.grammar import GrammarCompiler
from workers.errors import GrammarError, InvalidRequestError, UnavailableError
from workers.messages import Grammar

# The engine bounds its own effort, so this is for what it fails to bound.
COMPILE_TIMEOUT_S = 10.0
REMEMBERED_VERDICTS = 256


class GrammarCheck:
    """Says whether grammars can be compiled for one tokenizer, and remembers what it said.

    A thread of its own compiles one grammar at a time: neither the event loop nor the threads that tokenise wait.
    """

    def __init__(self, read_tokenizer: Callable[[], str | None], timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._compiler = GrammarCompiler(read_tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._timeout_s = timeout_s
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def check(self, param: str, grammar: Grammar) -> None:
        """Return if `grammar` can be used. InvalidRequestError names `param` and says why it cannot."""
        reason = self._verdicts.pop(grammar) if grammar in self._verdicts else await self._verdict(grammar)
        self._verdicts[grammar] = reason  # at the end, where it stays longest
        if len(self._verdicts) > REMEMBERED_VERDICTS:
            self._verdicts.popitem(last=False)
        if reason is not None:
            raise InvalidRequestError(f"{param}: {reason}.", param)

    async def _verdict(self, grammar: Grammar) -> str | None:
        """Return what is wrong with `grammar`, if anything. UnavailableError if others take all the time."""
        compiling = self._thread.submit(self._compiler.compile, grammar)
        try:
            await asyncio.wait_for(asyncio.wrap_future(compiling), self._timeout_s)
        except GrammarError as error:
            return str(error)
        except TimeoutError:
            if not compiling.running():
                raise UnavailableError("Other grammars are being compiled.") from None
            return f"takes more than {self._timeout_s:g} s to compile"
        return None
