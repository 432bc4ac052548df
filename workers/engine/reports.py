"""Reports of log-probabilities: what the items of a step ask for, worked out in one call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from workers.decoding.logprobs import split_logprobs, token_logprobs
from workers.decoding.verification import VerifiedProposal
from workers.engine.item_rows import ItemRows, select_rows
from workers.messages import TokenIds, TokenLogprobs, VerifiedItem

NOT_FINITE = "the target's logits are not finite for this sequence"


@dataclass(frozen=True, slots=True)
class _Report:
    """A report wanted by the item with index `answer`: on `tokens`, with the `top` likeliest tokens of each."""

    answer: int
    scored: bool
    rows: npt.NDArray[np.integer]
    tokens: TokenIds
    top: int


def with_reports(
    logits: torch.Tensor,
    parts: Sequence[ItemRows],
    outcomes: Mapping[int, VerifiedProposal],
    answers: Sequence[VerifiedItem],
) -> list[VerifiedItem]:
    """Return `answers` with the log-probabilities that their items asked for.

    `logits` [R, V] are the step's; `outcomes`, by sequence id, say which of a proposal's draws the answers hold.
    A sequence whose report would not be a number gets a fault instead.
    """
    reported = list(answers)
    wanted = [
        report
        for index, part in enumerate(parts)
        if part.item.logprobs is not None and answers[index].fault is None
        for report in _wanted(index, part, outcomes.get(part.item.sequence_id))
    ]
    if not wanted:
        return reported
    counts, tops = [len(report.tokens) for report in wanted], [report.top for report in wanted]
    rows = select_rows(logits, [report.rows for report in wanted])
    together = token_logprobs(rows, np.concatenate([report.tokens for report in wanted]), max(tops))
    for report, logprobs in zip(wanted, split_logprobs(together, counts, tops), strict=True):
        reported[report.answer] = _reported(reported[report.answer], report.scored, logprobs)
    return reported


def _wanted(index: int, part: ItemRows, outcome: VerifiedProposal | None) -> Iterator[_Report]:
    top = part.item.logprobs or 0
    if len(part.item.scored):
        yield _Report(index, True, part.first + np.arange(len(part.item.scored)), part.item.scored, top)
    if outcome is not None:
        yield _Report(index, False, part.first_draw + outcome.rows, outcome.token_ids, top)


def _reported(answer: VerifiedItem, scored: bool, logprobs: TokenLogprobs) -> VerifiedItem:
    if np.isnan(logprobs.chosen).any():
        return VerifiedItem(answer.sequence_id, answer.epoch, fault=NOT_FINITE)
    return replace(answer, scored=logprobs) if scored else replace(answer, logprobs=logprobs)
