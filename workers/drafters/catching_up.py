"""What is left to read of a sequence of which some, or even all, is there already."""

from dataclasses import dataclass, replace

import numpy as np

from workers.drafters.forecasts import Forecast
from workers.engine.followed import FollowedSequences
from workers.engine.step import StepInput
from workers.messages import DraftAheadItem, ProposeItem, TokenIds, Verification


def unread_part(followed: FollowedSequences, item: ProposeItem) -> ProposeItem:
    """Return the item without those of its tokens that have been read, but for the last one."""
    same = _tokens_there(followed, item.sequence_id, item.first_position, item.committed)
    skipped = max(0, min(same, len(item.committed) - 1))
    return replace(item, first_position=item.first_position + skipped, committed=item.committed[skipped:])


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read before drafting ahead of `forecast`, whose guesses are those that are known without it.

    `step` is None where everything is there. `guesses` more are to be drawn from its logits.
    """

    item: DraftAheadItem
    forecast: Forecast
    step: StepInput | None
    guesses: int


def plan_reading(
    followed: FollowedSequences, item: DraftAheadItem, known: Forecast | None, context_length: int
) -> Reading:
    """Return what to read of commits and drafts, as far as they fit into the context.

    `known` is what was expected of the sequence last; of its guesses those are kept that stand behind the same tokens.
    """
    base = item.first_position + len(item.committed)
    drafts = item.drafts[: max(0, context_length - base)]
    wanted = np.concatenate([item.committed, drafts])
    end = item.first_position + len(wanted)
    first_unread = item.first_position + _tokens_there(followed, item.sequence_id, item.first_position, wanted)
    forecast = _still_valid(known, base, drafts, first_unread)
    missing = 0
    if forecast.verification is Verification.COUPLED:
        missing = len(drafts) + 1 - len(forecast.guesses)
    # A guess is drawn from the logits behind the token before it.
    first = min(first_unread, end - missing)
    if first >= end:
        return Reading(item, forecast, None, 0)
    before = followed.tokens(item.sequence_id, first, item.first_position)
    tokens = np.concatenate([before, wanted[max(0, first - item.first_position) :]])
    return Reading(item, forecast, StepInput(item.sequence_id, first, tokens, logit_rows=missing), missing)


def _tokens_there(followed: FollowedSequences, sequence_id: int, first_position: int, tokens: TokenIds) -> int:
    """Return how many of `tokens`, from `first_position` on, have been read."""
    read = followed.tokens(sequence_id, first_position, first_position + len(tokens))
    differing = np.flatnonzero(read != tokens[: len(read)])
    return int(differing[0]) if len(differing) else len(read)


def _still_valid(known: Forecast | None, base: int, drafts: TokenIds, first_unread: int) -> Forecast:
    """Return the part of `known` that stands behind the same commits and drafts, with these drafts."""
    tokens: list[int] = drafts.tolist()
    if known is None:
        return Forecast(base, Verification.COUPLED, tokens)
    if known.base != base or first_unread < base:
        return Forecast(base, known.verification, tokens)
    same = 0
    while same < min(len(tokens), len(known.drafts)) and tokens[same] == known.drafts[same]:
        same += 1
    return Forecast(base, known.verification, tokens, known.guesses[: same + 1])
