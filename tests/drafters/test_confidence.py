"""The drafter's confidence in its drafts, over tables: learnt from what is committed, and a reason to stop."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.fakes.table_engine import Table, TableEngine, random_table
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.verifier import Verifier
from workers.messages import (
    Float32s,
    Proposal,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    Verification,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

TARGET = random_table(5, 12, 2.5)
DRAFTER = TARGET + random_table(6, 12, 1.2)
PROMPT = [1, 2, 3]
SAMPLINGS = [SamplingParams(temperature=0), SamplingParams(temperature=0.8)]


@dataclass
class Rounds:
    """Drafter and verifier that decode one sequence after the other; what each draft's confidence was, and its fate."""

    drafter: ModelDrafter
    verifier: Verifier
    trials: list[tuple[float, bool]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, target: Table, drafter: Table) -> "Rounds":
        return cls(
            ModelDrafter(TableEngine(drafter).as_engine()),
            Verifier(TableEngine(target).as_engine()),
        )

    def decode(self, number: int, sampling: SamplingParams, tokens: int, k: int, **options: object) -> list[int]:
        known, cached, drafted = list(PROMPT), 0, 0
        while len(known) < tokens:
            start = {"sampling": sampling, "prompt_tokens": len(PROMPT)}
            item = ProposeItem(
                number,
                0,
                drafted,
                token_ids(known[drafted:]),
                k,
                **(start if not drafted else {}),
                **options,  # type: ignore[arg-type]
            )
            proposal = self.drafter.propose(ProposeRequest((item,))).items[0].proposal
            verified = self.verify(
                VerifyItem(
                    number,
                    0,
                    cached,
                    token_ids(known[cached:]),
                    proposal,
                    **(start if not cached else {}),  # type: ignore[arg-type]
                )
            )
            self.note(proposal, len(verified) - 1)
            drafted = len(known) + min(len(verified) - 1, len(proposal) - 1)
            cached = len(known) + len(verified) - 1
            known += verified
        return known

    def verify(self, item: VerifyItem) -> list[int]:
        drawn: list[int] = self.verifier.verify(VerifyRequest((item,))).items[0].token_ids.tolist()
        return drawn

    def note(self, proposal: Proposal, accepted: int) -> None:
        confidence = proposal.confidence
        assert confidence is not None and confidence.dtype == np.float32 and len(confidence) == len(proposal)
        self.lengths.append(len(proposal))
        self.trials += [(float(each), index < accepted) for index, each in enumerate(confidence[: accepted + 1])]


def error(trials: list[tuple[float, bool]]) -> float:
    """How far confidence and outcomes are apart in the mean of eight bins of equal size."""
    confidence, came = (np.array(each, dtype=float) for each in zip(*sorted(trials), strict=True))
    bins = [(c.mean(), a.mean()) for c, a in zip(np.array_split(confidence, 8), np.array_split(came, 8), strict=True)]
    return float(np.mean([abs(c - a) for c, a in bins]))


@pytest.mark.parametrize("verification", Verification)
def test_confidence_comes_to_be_how_often_drafts_are_accepted(verification: Verification) -> None:
    rounds = Rounds.of(TARGET, DRAFTER)
    for number in range(28):
        sampling = SamplingParams(temperature=0.8 + 0.4 * (number % 2), seed=number)
        rounds.decode(number, sampling, 120, 4, verification=verification)
    late = rounds.trials[len(rounds.trials) // 2 :]
    assert len(late) > 1000
    assert error(late) < 0.06
    right, wrong = ([each for each, came in late if came is kind] for kind in (True, False))
    # A margin tells more than a probability.
    assert np.mean(right) > np.mean(wrong) + (0.05 if verification is Verification.COUPLED else 0.01)


def chains(least_confidence: float, sampling: SamplingParams) -> tuple[list[list[int]], list[Float32s]]:
    """The chains drafted for some sequences that start afresh, with their confidences."""
    drafter = ModelDrafter(TableEngine(DRAFTER).as_engine())
    items = [
        ProposeItem(n, 0, 0, token_ids([n, 2, n]), 6, sampling, 3, least_confidence=least_confidence) for n in range(12)
    ]
    answers = [drafter.propose(ProposeRequest((item,))).items[0].proposal for item in items]
    return [each.token_ids.tolist() for each in answers], [each.confidence for each in answers]  # type: ignore[misc]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_chain_ends_where_all_of_it_is_unlikely(sampling: SamplingParams) -> None:
    whole, confidences = chains(0.0, sampling)
    short, _ = chains(0.55, sampling)
    assert all(len(each) == 6 for each in whole)
    expected = []
    for tokens, confidence in zip(whole, confidences, strict=True):
        below = np.flatnonzero(np.cumprod(confidence) < 0.55)
        expected.append(tokens[: int(below[0]) + 1 if len(below) else 6])
    assert short == expected
    assert len({len(each) for each in short}) > 1
    assert all(len(each) == 1 for each in chains(1.0, sampling)[0])


def test_no_least_confidence_changes_the_ids() -> None:
    ids = [
        Rounds.of(TARGET, DRAFTER).decode(0, SamplingParams(temperature=0.9, seed=4), 60, 4, least_confidence=least)[
            :60
        ]
        for least in (0.0, 0.3, 0.9)
    ]
    assert ids[0] == ids[1] == ids[2]
