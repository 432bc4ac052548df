"""What a request's rules say of single logits, position by position, each with the history that position really has.

Position p of a sequence sees the tokens before p: prompt, committed tokens and, along a proposal, the drafts before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.messages import BANNING_BIAS, LogitRules, TokenIds

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def _ids(values: Iterable[int]) -> Ids:
    return np.fromiter(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CompiledRules:
    """`LogitRules` in the form in which they are applied; made once per sequence.

    `biases` float32 [n] belong to `biased_ids` int64 [n]; `banned_ids` are banned at every position.
    """

    rules: LogitRules
    end_ids: Ids
    biased_ids: Ids
    biases: Floats
    banned_ids: Ids

    @classmethod
    def of(cls, rules: LogitRules) -> "CompiledRules":
        """Compile `rules`, whose ids must lie in the vocabulary."""
        biased = [(token, bias) for token, bias in rules.logit_bias if bias > BANNING_BIAS]
        return cls(
            rules,
            end_ids=_ids(rules.end_token_ids),
            biased_ids=_ids(token for token, _ in biased),
            biases=np.array([bias for _, bias in biased], dtype=np.float32),
            banned_ids=_ids(token for token, bias in rules.logit_bias if bias <= BANNING_BIAS),
        )


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The rules of one sequence and its `tokens` int32 [n], of which the first `prompt_tokens` are the prompt.

    Only tokens before a position are looked at, so `tokens` may go on beyond the positions asked about.
    """

    compiled: CompiledRules
    tokens: TokenIds
    prompt_tokens: int

    def banned_ids(self, position: int) -> Ids:
        """Return the ids that cannot be drawn at `position`, some perhaps twice."""
        rules, output_tokens = self.compiled.rules, position - self.prompt_tokens
        banned = [self.compiled.banned_ids]
        if output_tokens < rules.min_tokens:
            banned.append(self.compiled.end_ids)
        return np.concatenate(banned)
