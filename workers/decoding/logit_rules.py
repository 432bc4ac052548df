"""What a request's rules say of single logits, position by position, each with the history that position really has.

Position p of a sequence sees the tokens before p: prompt, committed tokens and, along a proposal, the drafts before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.decoding.grammar import AllowedBits, GrammarMasks
from workers.messages import BANNING_BIAS, LogitRules, TokenIds

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def _ids(values: Iterable[int]) -> Ids:
    return np.fromiter(values, dtype=np.int64)


# Nobody can tell a stronger penalty from these, which keep float32 logits of any size finite.
_SMALLEST_PENALTY, _LARGEST_PENALTY = 1e-20, 1e20


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of `ids` int64 [n] at r positions: `divisors` and `subtrahends` float32 [r, n], 1 and 0 for none.

    A positive logit is divided by its divisor, any other multiplied with it; then the subtrahend is taken off.
    """

    ids: Ids
    divisors: Floats
    subtrahends: Floats


@dataclass(frozen=True, slots=True)
class CompiledRules:
    """`LogitRules` in the form in which they are applied; made once per sequence.

    `biases` float32 [n] belong to `biased_ids` int64 [n]; `banned_ids` are banned at every position. `bad_words` are
    those of several tokens, by their last token but one.
    """

    rules: LogitRules
    end_ids: Ids
    biased_ids: Ids
    biases: Floats
    banned_ids: Ids
    bad_words: Mapping[int, list[tuple[int, ...]]]

    @classmethod
    def of(cls, rules: LogitRules) -> "CompiledRules":
        """Compile `rules`, whose ids must lie in the vocabulary."""
        bad_words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in rules.bad_words:
            if len(word) > 1:
                bad_words[word[-2]].append(word)
        biased = [(token, bias) for token, bias in rules.logit_bias if bias > BANNING_BIAS]
        return cls(
            rules,
            end_ids=_ids(rules.end_token_ids),
            biased_ids=_ids(token for token, _ in biased),
            biases=np.array([bias for _, bias in biased], dtype=np.float32),
            banned_ids=_ids(
                [token for token, bias in rules.logit_bias if bias <= BANNING_BIAS]
                + [word[0] for word in rules.bad_words if len(word) == 1]
            ),
            bad_words=dict(bad_words),
        )

    @property
    def penalises(self) -> bool:
        """Whether there are penalties at all."""
        rules = self.rules
        return rules.repetition_penalty != 1 or rules.presence_penalty != 0 or rules.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The rules of one sequence and its `tokens` int32 [n], of which the first `prompt_tokens` are the prompt.

    Only tokens before a position are looked at, so `tokens` may go on beyond the positions asked about.
    """

    compiled: CompiledRules
    tokens: TokenIds
    prompt_tokens: int
    grammar: GrammarMasks | None = None

    def allowed(self, position: int) -> AllowedBits | None:
        """Return the ids that the grammar allows at `position`, a bit for each; None where there is no grammar."""
        if self.grammar is None:
            return None
        output = self.tokens[self.prompt_tokens : position]
        return self.grammar.allowed_after(output, hold_back_ends=len(output) < self.compiled.rules.min_tokens)

    def banned_ids(self, position: int) -> Ids:
        """Return the ids that cannot be drawn at `position`, some perhaps twice."""
        rules, output_tokens = self.compiled.rules, position - self.prompt_tokens
        banned = [self.compiled.banned_ids]
        # A grammar sees to its own ends, lest it be left with nothing.
        if output_tokens < rules.min_tokens and self.grammar is None:
            banned.append(self.compiled.end_ids)
        if self.compiled.bad_words:
            banned.append(_ids(self._completing(position)))
        return np.concatenate(banned)

    def _completing(self, position: int) -> Iterator[int]:
        """Yield the tokens that would complete a bad word at `position`.

        As in vLLM (vllm/v1/sample/ops/bad_words.py) the word must be output from its first token on; what the prompt
        ends with completes nothing.
        """
        output = self.tokens[self.prompt_tokens : position]
        for word in self.compiled.bad_words.get(int(output[-1]), ()) if len(output) else ():
            if tuple(output[1 - len(word) :].tolist()) == word[:-1]:
                yield word[-1]

    def penalties(self, positions: range) -> Penalties:
        """Return the penalties at `positions`, which are consecutive and lie behind the prompt.

        Meaning and order are those of vLLM (vllm/model_executor/layers/utils.py, `apply_penalties`): repetition counts
        prompt and output (Keskar et al. 2019, "CTRL", section 4.1, as in transformers), frequency and presence only
        the output (OpenAI's API reference).
        """
        rules = self.compiled.rules
        if not self.compiled.penalises:
            nothing = np.empty((len(positions), 0), dtype=np.float32)
            return Penalties(_ids(()), nothing, nothing)
        # The prompt matters to the repetition penalty alone.
        start = self.prompt_tokens if rules.repetition_penalty == 1 else 0
        ids, slots = _distinct(self.tokens[start : positions[-1]])
        in_prompt = np.zeros(len(ids), dtype=bool)
        in_prompt[slots[: self.prompt_tokens - start]] = True
        counts = _growing_counts(slots[self.prompt_tokens - start :], len(positions), len(ids))
        in_output = counts > 0
        penalty = min(max(rules.repetition_penalty, _SMALLEST_PENALTY), _LARGEST_PENALTY)
        divisors = np.where(in_prompt | in_output, np.float32(penalty), np.float32(1))
        subtrahends = np.float32(rules.frequency_penalty) * counts
        subtrahends += np.where(in_output, np.float32(rules.presence_penalty), np.float32(0))
        return Penalties(ids, divisors, subtrahends)


def _distinct(tokens: TokenIds) -> tuple[Ids, Ids]:
    """Return the ids that occur, int64 [n] ascending, and for each token the index of its id. Linear, unlike a sort."""
    occurs = np.zeros(int(tokens.max(initial=-1)) + 1, dtype=bool)
    occurs[tokens] = True
    ids = np.flatnonzero(occurs)
    index = np.empty(len(occurs), dtype=np.int64)
    index[ids] = np.arange(len(ids))
    return ids, index[tokens]


def _growing_counts(slots: Ids, rows: int, width: int) -> Floats:
    """Return float32 [rows, width]: how often each slot occurs before each of the last `rows` positions.

    `slots` int64 [n] are those of all output tokens before the last position: the last row counts all of them, the
    row before it all but the last, and so on.
    """
    known = len(slots) - rows + 1
    counts = np.empty((rows, width), dtype=np.float32)
    counts[0] = np.bincount(slots[:known], minlength=width)
    for row, slot in enumerate(slots[known:], start=1):
        counts[row] = counts[row - 1]
        counts[row, slot] += 1
    return counts
