"""The sequences a worker follows: who they are, how they sample, and whether a message continues them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from workers.decoding.grammar import GrammarCompiler, GrammarMasks
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import PositionRun
from workers.engine.engine import Engine
from workers.engine.step import StepInput
from workers.engine.token_history import TokenHistory
from workers.errors import GrammarError
from workers.messages import LogitRules, ProposeItem, SamplingParams, VerifyItem, WorkerStats


@dataclass(slots=True)
class _Followed:
    """A sequence; `history` is kept only where rules look at it."""

    sampling: SamplingParams
    prompt_tokens: int
    rules: CompiledRules | None
    grammar: GrammarMasks | None = None
    fault: str | None = None
    history: TokenHistory = field(default_factory=TokenHistory)


class FollowedSequences:
    """Keeps sampling parameters, and history for their rules, beside the engine's KV cache; all by sequence id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._grammars = GrammarCompiler(engine.tokenizer_json)
        self._sequences: dict[int, _Followed] = {}

    def accept(self, item: ProposeItem | VerifyItem) -> bool:
        """Start the sequence if the item says so; return False if it continues one that is not known here."""
        if item.sampling is not None:
            self._engine.start(item.sequence_id)
            self._sequences[item.sequence_id] = self._begin(item.sampling, item.prompt_tokens)
            return True
        length = self._engine.length(item.sequence_id)
        return length is not None and length >= item.first_position

    def _begin(self, sampling: SamplingParams, prompt_tokens: int) -> _Followed:
        if sampling.rules is None:
            return _Followed(sampling, prompt_tokens, None)
        rules = CompiledRules.of(sampling.rules)
        try:
            return _Followed(sampling, prompt_tokens, rules, self._masks(sampling.rules))
        except GrammarError as error:
            return _Followed(sampling, prompt_tokens, rules, fault=f"the grammar cannot be applied: {error}")

    def _masks(self, rules: LogitRules) -> GrammarMasks | None:
        if rules.grammar is None:
            return None
        compiled = self._grammars.compile(rules.grammar)
        return GrammarMasks(compiled, rules.end_token_ids, self._engine.vocabulary_size)

    def read(self, inputs: Sequence[StepInput]) -> torch.Tensor:
        """Let the engine read `inputs` and return its logits; see `Engine.forward`.

        The history follows the KV cache: it is cut back to each input's first position, then grows by its tokens.
        """
        logits = self._engine.forward(inputs)
        for item in inputs:
            followed = self._sequences[item.sequence_id]
            if followed.rules is not None:
                followed.history.write(item.first_position, item.token_ids)
        return logits

    def run(self, sequence_id: int, first_position: int, positions: int) -> PositionRun:
        """Return what is needed to draw tokens for `positions` positions, those before them having been read."""
        followed = self._sequences[sequence_id]
        context = None
        if followed.rules is not None:
            context = RuleContext(followed.rules, followed.history.tokens, followed.prompt_tokens, followed.grammar)
        return PositionRun(followed.sampling, first_position, positions, context)

    def fault(self, sequence_id: int) -> str | None:
        """Return why the sequence's grammar cannot be applied here, if it has one and that is so.

        Tokens are drawn without it then: good enough for a guess.
        """
        return self._sequences[sequence_id].fault

    def has_rules(self, sequence_id: int) -> bool:
        """Whether the sequence was started with logit rules."""
        return self._sequences[sequence_id].rules is not None

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free their KV blocks."""
        if sequence_ids is None:
            self._engine.release(None)
            self._sequences.clear()
            return
        released = tuple(sequence_ids)
        self._engine.release(released)
        for sequence_id in released:
            self._sequences.pop(sequence_id, None)

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        return WorkerStats(self._engine.sequences, self._engine.free_blocks, self._engine.total_blocks)
