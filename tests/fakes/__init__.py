"""Stand-ins that tests share: a generation service that plays a script, tokenizers, and workers without a model."""

from tests.fakes.links import REQUEST_IN_SERVICE, ContextNotingLink, HangingLink, HoldingLink, SlowReadingLink
from tests.fakes.service import TARGET, Script, ScriptedService, in_blocks
from tests.fakes.tokenizers import END_OF_TEXT, PLAIN_TEMPLATE, byte_tokenizer, piece_tokenizer, word_tokenizer
from tests.fakes.toy import (
    FIRST_TOY_OUTPUT,
    TOY_VOCABULARY,
    Guess,
    never_right,
    sometimes_right,
    toy_continuation,
    toy_logprob,
    toy_logprobs,
    toy_next,
)
from tests.fakes.troubles import HeldSequence, Poison, Trouble
from tests.fakes.workers import (
    ProtocolViolation,
    ScriptedDrafter,
    ScriptedTarget,
    ScriptedWorker,
    SwayedTarget,
)

__all__ = [
    "END_OF_TEXT",
    "FIRST_TOY_OUTPUT",
    "PLAIN_TEMPLATE",
    "REQUEST_IN_SERVICE",
    "TARGET",
    "TOY_VOCABULARY",
    "ContextNotingLink",
    "Guess",
    "HangingLink",
    "HeldSequence",
    "HoldingLink",
    "Poison",
    "ProtocolViolation",
    "Script",
    "ScriptedDrafter",
    "ScriptedService",
    "ScriptedTarget",
    "ScriptedWorker",
    "SlowReadingLink",
    "SwayedTarget",
    "Trouble",
    "byte_tokenizer",
    "in_blocks",
    "never_right",
    "piece_tokenizer",
    "sometimes_right",
    "toy_continuation",
    "toy_logprob",
    "toy_logprobs",
    "toy_next",
    "word_tokenizer",
]
