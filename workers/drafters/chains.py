"""Chains of drafts while they grow, each token drawn as the target will verify it: coupled, or from a sparse q."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from workers.decoding.noise import Stream
from workers.decoding.ratio import draw_sparsely
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_with_runners_up
from workers.drafters.forecasts import Experience, Forecast, Guess
from workers.engine.followed import FollowedSequences
from workers.engine.step import StepInput
from workers.messages import (
    NO_PROPOSAL,
    Float32s,
    Proposal,
    ProposeItem,
    SparseProbabilities,
    TokenIds,
    Verification,
    token_ids,
)

# That many runners-up of each draft are looked at when drafting ahead.
RUNNERS_UP = 3


@dataclass(slots=True)
class Chain:
    """The drafts of one sequence so far, each with the drafter's `confidence` in it; `guesses` are as in `Forecast`.

    `q_ids` and `q` are the rows that they were drawn from, for RATIO only.
    """

    item: ProposeItem
    tokens: list[int] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q_ids: list[TokenIds] = field(default_factory=list)
    q: list[Float32s] = field(default_factory=list)

    @property
    def base(self) -> int:
        """The position of the first draft."""
        return self.item.first_position + len(self.item.committed)

    @property
    def next_position(self) -> int:
        """The position of the next draft."""
        return self.base + len(self.tokens)

    def forecast(self) -> Forecast:
        """Return what the chain expects."""
        return Forecast(self.base, self.item.verification, self.tokens, self.guesses)

    @property
    def is_likely(self) -> bool:
        """Whether all of it may be accepted, for all that the item asks.

        Where it is not, the last draft stays all the same: a ratio chain that left out drafts for what they are would
        not be drawn from q any more.
        """
        return math.prod(self.confidence) >= self.item.least_confidence

    def add(self, guess: Guess, confidence: float) -> None:
        """Append the guess as a draft."""
        self.guesses.append(guess)
        self.tokens.append(guess.token)
        self.confidence.append(confidence)

    @property
    def by_ratio(self) -> bool:
        """Whether the drafts will be verified by ratio."""
        return self.item.verification is Verification.RATIO

    def proposal(self) -> Proposal:
        """Return the chain as the target reads it. Columns of q that are 0 in all rows are left out."""
        tokens, confidence = token_ids(self.tokens), np.array(self.confidence, dtype=np.float32)
        if not self.tokens:
            return NO_PROPOSAL
        if not self.by_ratio:
            return Proposal(tokens, confidence=confidence)
        ids, q = np.stack(self.q_ids).astype(np.int32), np.stack(self.q)
        # The likeliest come first, so that what filters removed is at the end.
        width = int((q > 0).any(axis=0).sum())
        return Proposal(tokens, q=SparseProbabilities(ids[:, :width], q[:, :width]), confidence=confidence)


def extend_chains(
    chains: Sequence[Chain], logits: torch.Tensor, runs: Sequence[PositionRun], experience: Experience
) -> list[Chain]:
    """Draw the next token of each chain from its row of `logits` float32 [chains, V].

    Returns the chains that grew; one whose logits are not finite does not.
    """
    extended: list[Chain] = []
    for by_ratio in (False, True):
        rows = [index for index, chain in enumerate(chains) if chain.by_ratio is by_ratio]
        if not rows:
            continue
        extend = _extend_by_ratio if by_ratio else _extend_coupled
        chosen = logits if len(rows) == len(chains) else logits[torch.tensor(rows, device=logits.device)]
        extended += extend([chains[row] for row in rows], chosen, [runs[row] for row in rows], experience)
    return extended


class ChainSteps:
    """The steps in which chains grow: what each reads next, and what is drawn behind that."""

    def __init__(self, followed: FollowedSequences, experience: Experience, context_length: int) -> None:
        self._followed = followed
        self._experience = experience
        self._context_length = context_length

    def first_inputs(self, chains: Sequence[Chain]) -> list[StepInput]:
        """Return the step that reads what the chains' items commit."""
        return [
            StepInput(chain.item.sequence_id, chain.item.first_position, chain.item.committed, logit_rows=1)
            for chain in chains
        ]

    def next_inputs(self, chains: Sequence[Chain]) -> list[StepInput]:
        """Return the step that reads the last draft of each chain."""
        return [
            StepInput(chain.item.sequence_id, chain.next_position - 1, token_ids(chain.tokens[-1:]), logit_rows=1)
            for chain in chains
        ]

    def extend(self, chains: Sequence[Chain], logits: torch.Tensor) -> list[Chain]:
        """Draw the next token of each chain from its row of `logits` float32 [chains, V]; return those that go on."""
        if not chains:
            return []
        runs = [self._followed.run(chain.item.sequence_id, chain.next_position, positions=1) for chain in chains]
        drawn = extend_chains(chains, logits, runs, self._experience)
        return [chain for chain in drawn if self._goes_on(chain)]

    def _goes_on(self, chain: Chain) -> bool:
        """Whether another token is wanted, and the last one can still be read within the context."""
        wanted = len(chain.tokens) < chain.item.draft_tokens and chain.is_likely
        return wanted and chain.next_position <= self._context_length


def coupled_guesses(logits: torch.Tensor, runs: Sequence[PositionRun]) -> list[Guess | None]:
    """Draw a token for each position of `runs` with the target's noise, from `logits` float32 [positions, V].

    None stands for a position whose logits are not finite.
    """
    draws = draw_with_runners_up(logits, SamplingRows.of_runs(runs, device=logits.device), RUNNERS_UP)
    return [
        None if token == INVALID_TOKEN else Guess(token, gaps[0] if gaps else math.inf, ids, gaps)
        for token, ids, gaps in zip(draws.tokens.tolist(), draws.runners_up, draws.gaps, strict=True)
    ]


def _extend_coupled(
    chains: Sequence[Chain], logits: torch.Tensor, runs: Sequence[PositionRun], experience: Experience
) -> list[Chain]:
    extended = []
    for chain, guess in zip(chains, coupled_guesses(logits, runs), strict=True):
        if guess is not None:
            chain.add(guess, experience.confidence(Verification.COUPLED, guess))
            extended.append(chain)
    return extended


def _extend_by_ratio(
    chains: Sequence[Chain], logits: torch.Tensor, runs: Sequence[PositionRun], experience: Experience
) -> list[Chain]:
    drawn = draw_sparsely(logits, SamplingRows.of_runs(runs, device=logits.device, stream=Stream.DRAFT))
    extended = []
    for row, chain in enumerate(chains):
        token = int(drawn.tokens[row])
        if token == INVALID_TOKEN:
            continue
        guess = Guess(token, float(drawn.q[row][drawn.ids[row] == token][0]))
        chain.add(guess, experience.confidence(Verification.RATIO, guess))
        chain.q_ids.append(drawn.ids[row].astype(np.int32))
        chain.q.append(drawn.q[row])
        extended.append(chain)
    return extended
