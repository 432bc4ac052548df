"""The sequences a worker follows: who they are, how they sample, and whether a message continues them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from workers.decoding.grammar import GrammarCompiler, GrammarMasks
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import PositionRun
from workers.decoding.trees import ancestry, straight_runs
from workers.engine.engine import Engine
from workers.engine.step import AcceptedPath, StepInput
from workers.engine.token_history import TokenHistory
from workers.errors import GrammarError
from workers.messages import LogitRules, Proposal, ProposeItem, SamplingParams, TokenIds, VerifyItem, WorkerStats

Item = TypeVar("Item", ProposeItem, VerifyItem)


@dataclass(slots=True)
class _Followed:
    """A sequence: how it is sampled, and the tokens whose KV is cached."""

    sampling: SamplingParams
    prompt_tokens: int
    rules: CompiledRules | None
    grammar: GrammarMasks | None = None
    fault: str | None = None
    history: TokenHistory = field(default_factory=TokenHistory)


class FollowedSequences:
    """Keeps sampling parameters and the tokens read beside the engine's KV cache, by sequence id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._grammars = GrammarCompiler(engine.tokenizer_json)
        self._sequences: dict[int, _Followed] = {}

    def accept(self, item: Item) -> Item | None:
        """Start the sequence if the item says so; return None if it continues one that is not known here.

        The item is returned without what is cached of its tokens already: `first_position` is the first to be read.
        Where even more is cached, `committed` is empty, and `first_position` is how many tokens are.
        """
        if item.sampling is None:
            return item if self.has_read(item.sequence_id, item.first_position) else None
        cached = self._engine.start(item.sequence_id, item.prompt, item.cache_salt)
        followed = self._sequences[item.sequence_id] = self._begin(item.sampling, item.prompt_tokens)
        if not cached or item.prompt is None:
            return item
        followed.history.write(0, item.prompt[:cached])
        return replace(item, first_position=cached, committed=item.committed[cached:])

    def has_read(self, sequence_id: int, tokens: int) -> bool:
        """Whether the sequence is known here, with that many tokens at least."""
        length = self._engine.length(sequence_id)
        return length is not None and length >= tokens

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
            self._sequences[item.sequence_id].history.write(item.first_position, item.token_ids)
        return logits

    def fork(self, sequence_id: int, fork_id: int, length: int) -> None:
        """Follow another sequence that begins with the first `length` tokens of this one; see `Engine.fork`."""
        self._engine.fork(sequence_id, fork_id, length)
        followed = self._sequences[sequence_id]
        fork = self._sequences[fork_id] = replace(followed, history=TokenHistory())
        fork.history.write(0, followed.history.tokens[:length])

    def adopt(self, sequence_id: int, fork_id: int) -> None:
        """Put a fork in the place of the sequence; see `Engine.adopt`."""
        self._engine.adopt(sequence_id, fork_id)
        self._sequences[sequence_id] = self._sequences.pop(fork_id)

    def publish(self, sequence_id: int, tokens: int) -> None:
        """Let later sequences begin with the KV of this one's first `tokens` tokens.

        They are committed, or verified drafts, and a token was drawn behind them: so their KV is finite. If the router
        never hears of the verification and rolls the sequence back, nothing is found under a digest it does not have.
        """
        if self._engine.prefix_caching:
            self._engine.publish(sequence_id, self._sequences[sequence_id].history.tokens[:tokens])

    def withdraw(self, sequence_id: int) -> None:
        """Let no later sequence begin with KV that this one holds; something is wrong with it."""
        self._engine.withdraw(sequence_id)

    def tokens(self, sequence_id: int, first: int, end: int) -> TokenIds:
        """Return what was read for positions `first` to `end` - 1, as far as it goes: a view until the next `read`."""
        return self._sequences[sequence_id].history.tokens[first:end]

    def sampling(self, sequence_id: int) -> SamplingParams:
        """Return the parameters that the sequence was started with."""
        return self._sequences[sequence_id].sampling

    def run(self, sequence_id: int, first_position: int, positions: int) -> PositionRun:
        """Return what is needed to draw tokens for `positions` positions, those before them having been read."""
        followed = self._sequences[sequence_id]
        context = None
        if followed.rules is not None:
            context = RuleContext(followed.rules, followed.history.tokens, followed.prompt_tokens, followed.grammar)
        return PositionRun(followed.sampling, first_position, positions, context)

    def tree_runs(self, sequence_id: int, first_position: int, tree: Proposal) -> list[PositionRun]:
        """Return what is needed to draw behind the last committed token and behind each node of `tree`, in this order.

        The tree begins at `first_position` and has been read. Every position gets the history of its own path.
        """
        assert tree.parents is not None
        followed = self._sequences[sequence_id]
        committed = followed.history.tokens[:first_position]
        descends = ancestry(tree.parents)
        runs = []
        for rows in straight_runs(tree.parents):
            # Row 0 is behind the last committed token, row 1 + i behind node i and all it descends from.
            above = int(descends[rows[0] - 1].sum()) if rows[0] else 0
            context = None
            if followed.rules is not None:
                path = tree.token_ids[descends[rows[-1] - 1]] if rows[-1] else tree.token_ids[:0]
                context = RuleContext(
                    followed.rules, np.concatenate([committed, path]), followed.prompt_tokens, followed.grammar
                )
            runs.append(PositionRun(followed.sampling, first_position + above, len(rows), context))
        return runs

    def keep_paths(self, paths: Sequence[AcceptedPath]) -> None:
        """Let KV cache and history hold the accepted paths instead of the trees; see `Engine.keep_paths`."""
        self._engine.keep_paths(paths)
        for path in paths:
            history = self._sequences[path.sequence_id].history
            history.write(path.first_position, history.tokens[path.first_position + path.nodes])

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
        return self._engine.stats()
