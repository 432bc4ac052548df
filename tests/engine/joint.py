"""Three tokens by speculation, over tables: how often each continuation comes, and how often it should.

Real drafter, real verifier, real messages; only the two models are tables. The expected distribution is worked out by
enumeration, with a reading of the sampling options that shares no code with the product's.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tests.fakes.table_engine import Table, TableEngine
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.verifier import Verifier
from workers.messages import (
    LogitRules,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    Verification,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

PROMPT = (0, 1)
TOKENS = 3
_BATCH = 5_000


@dataclass(frozen=True)
class Drawn:
    """`counts` int64 [V ** 3] of the continuations, and `accepted` int64 [k + 1]: first rounds by accepted drafts."""

    counts: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]


def draw_continuations(
    target: Table,
    drafter: Table,
    sampling: SamplingParams,
    verification: Verification,
    seeds: range,
    draft_tokens: Sequence[int] = (2, 1),
    least_confidence: float = 0.0,
) -> Drawn:
    """Continue PROMPT once per seed, with as many drafts per round as `draft_tokens` says, the last for all others."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted: Counter[int] = Counter()
    for start in range(0, len(seeds), _BATCH):
        batch = _Batch(target, drafter, sampling, verification, seeds[start : start + _BATCH], least_confidence)
        for k in itertools.chain(draft_tokens, itertools.repeat(draft_tokens[-1])):
            kept = batch.round(k)
            if len(kept) == len(batch.seeds):
                accepted.update(kept)
            if not batch.unfinished():
                break
        counts.update(tuple(tokens[:TOKENS]) for tokens in batch.outputs)
    return Drawn(
        np.array([counts[each] for each in itertools.product(range(len(target)), repeat=TOKENS)]),
        np.array([accepted[index] for index in range(max(draft_tokens) + 1)]),
    )


class _Batch:
    """Sequences that are drafted and verified together, started anew in every round."""

    def __init__(
        self,
        target: Table,
        drafter: Table,
        sampling: SamplingParams,
        verification: Verification,
        seeds: range,
        least_confidence: float,
    ) -> None:
        self.seeds = seeds
        self._least_confidence = least_confidence
        self.outputs: list[list[int]] = [[] for _ in seeds]
        self._sampling = sampling
        self._verification = verification
        self._drafter = ModelDrafter(TableEngine(drafter).as_engine())
        self._verifier = Verifier(TableEngine(target).as_engine())

    def unfinished(self) -> list[int]:
        """Return the indices of sequences that lack tokens."""
        return [index for index, output in enumerate(self.outputs) if len(output) < TOKENS]

    def round(self, k: int) -> list[int]:
        """Run one round of all unfinished sequences; return how many drafts each accepted."""
        proposing = tuple(self._propose_items(k))
        answers = self._drafter.propose(ProposeRequest(proposing)).items
        verifying = [
            VerifyItem(item.sequence_id, 0, 0, item.committed, answer.proposal, sampling=item.sampling, prompt_tokens=2)
            for item, answer in zip(proposing, answers, strict=True)
        ]
        accepted = []
        for verified in self._verifier.verify(VerifyRequest(tuple(verifying))).items:
            assert len(verified.token_ids) == verified.accepted + 1
            self.outputs[verified.sequence_id] += verified.token_ids.tolist()
            accepted.append(verified.accepted)
        return accepted

    def _propose_items(self, k: int) -> Iterator[ProposeItem]:
        for index in self.unfinished():
            tokens = token_ids([*PROMPT, *self.outputs[index]])
            sampling = replace(self._sampling, seed=self.seeds[index])
            item = ProposeItem(index, 0, 0, tokens, k, sampling, len(PROMPT), self._verification)
            yield replace(item, least_confidence=self._least_confidence)


def expected_joint(target: Table, sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """Return the probability of each continuation, float64 [V ** 3]."""
    probabilities = []
    for continuation in itertools.product(range(len(target)), repeat=TOKENS):
        history, probability = list(PROMPT), 1.0
        for token in continuation:
            probability *= _warped(target[history[-2], history[-1]], sampling, history)[token]
            history.append(token)
        probabilities.append(probability)
    return np.array(probabilities)


def _warped(logits: Table, sampling: SamplingParams, history: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return p after rules, temperature, min-p, top-k and top-p, in this order."""
    values = _ruled(logits.astype(np.float64), sampling.rules or LogitRules(), history)
    if sampling.temperature == 0:
        one_hot: npt.NDArray[np.float64] = np.eye(len(values))[values.argmax()]
        return one_hot
    weights = np.exp((values - values.max()) / sampling.temperature)
    weights[weights < sampling.min_p * weights.max()] = 0
    if sampling.top_k:
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        order = np.argsort(-weights)
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p * weights.sum()]] = 0
    normalised: npt.NDArray[np.float64] = weights / weights.sum()
    return normalised


def _ruled(values: npt.NDArray[np.float64], rules: LogitRules, history: Sequence[int]) -> npt.NDArray[np.float64]:
    output = history[len(PROMPT) :]
    for token, bias in rules.logit_bias:
        values[token] += bias if bias > -100 else -np.inf
    for token in set(history):
        factor = rules.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= rules.presence_penalty + rules.frequency_penalty * output.count(token)
    return values
