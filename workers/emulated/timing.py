"""How long an emulated device takes for a step, and waiting until it would be done."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from workers.messages import (
    DraftAheadRequest,
    DraftAheadResponse,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    VerifyResponse,
)

LAST_SLEEP_S = 0.0002


@dataclass(frozen=True, slots=True)
class TargetTiming:
    """A target's step: `base_ms`, and `token_ms` for each token read. The defaults are like 70B over four A100s."""

    base_ms: float = 30.0
    token_ms: float = 0.1

    def step_ms(self, read_tokens: int) -> float:
        """Return the time of a step that reads `read_tokens` tokens, commits and drafts together; 0 of none."""
        return self.base_ms + self.token_ms * read_tokens if read_tokens else 0.0

    def verify_ms(self, response: VerifyResponse) -> float:
        """Return the time of the step that `response` answers."""
        return self.step_ms(response.read_tokens)


@dataclass(frozen=True, slots=True)
class DrafterTiming:
    """A drafter's passes, one per draft: `step_ms`, and `row_ms` for each row. The defaults are like 1B on an L4.

    A row's first token is part of that; each further one that the first pass reads takes `read_token_ms`, also where a
    part of them was found cached, which a drafter does not tell.
    """

    step_ms: float = 4.0
    row_ms: float = 0.02
    read_token_ms: float = 0.02

    def passes_ms(self, rows: Sequence[int], read_tokens: int) -> float:
        """Return the time of passes with `rows` rows each, of which the first reads `read_tokens` tokens in all."""
        if not rows:
            return 0.0
        further_tokens = max(0, read_tokens - rows[0])
        return sum(self.step_ms + self.row_ms * count for count in rows) + self.read_token_ms * further_tokens

    def propose_ms(self, request: ProposeRequest, response: ProposeResponse) -> float:
        """Return the time of drafting what `response` holds: k drafts take k passes, none takes one, to read."""
        read = [
            (item, answer)
            for item, answer in zip(request.items, response.items, strict=True)
            if not answer.lost and answer.cached_tokens is None
        ]
        passes = [_passes(item, answer) for item, answer in read]
        return self.passes_ms(_rows(passes), sum(len(item.committed) for item, _ in read))

    def draft_ahead_ms(self, request: DraftAheadRequest, response: DraftAheadResponse) -> float:
        """Return the time of a pass over commits and drafts, and of a pass per draft over all branches.

        Branches of corrections begin in the former, unless only one is allowed; those behind all drafts after it.
        """
        read = [(item, answer) for item, answer in zip(request.items, response.items, strict=True) if not answer.lost]
        if not read:
            return 0.0
        early, late = [1] * len(read), list[int]()
        for item, answer in read:
            for branch in answer.branches:
                begins_late = item.branches == 1 or branch.accepted == len(item.drafts)
                (late if begins_late else early).append(len(branch.proposal))
        rows = [sum(pair) for pair in itertools.zip_longest(_rows(early), [0, *_rows(late)], fillvalue=0)]
        further_tokens = sum(len(item.committed) + len(item.drafts) - 1 for item, _ in read)
        return self.passes_ms(rows, rows[0] + further_tokens)


def _passes(item: ProposeItem, answer: ProposedItem) -> int:
    """A draft that its confidence kept out of the chain was drawn as well."""
    drafts = len(answer.proposal)
    cut_short = item.least_confidence > 0 and 0 < drafts < item.draft_tokens
    return max(1, drafts + cut_short)


def _rows(passes: Sequence[int]) -> list[int]:
    """Return how many rows take part in each pass, where row i takes part in the first `passes[i]`."""
    return [sum(count > index for count in passes) for index in range(max(passes, default=0))]


@dataclass(frozen=True, slots=True)
class EmulatedUsage:
    """What an emulated device has done: its steps, the milliseconds they took, and for how many tokens.

    `overruns` counts steps whose real computation took longer than the device would have, by `overrun_ms` together:
    where there are many, a figure says nothing of the emulated device. Steps in time end a little late all the same, by
    `late_ms` together, since no sleep is exact; that is in no step's time, so what waits for the step sees it.
    """

    steps: int = 0
    busy_ms: float = 0.0
    tokens: int = 0
    overruns: int = 0
    overrun_ms: float = 0.0
    late_ms: float = 0.0


class EmulatedDevice:
    """Stretches steps to the time that the device would take, and counts."""

    def __init__(self) -> None:
        self.usage = EmulatedUsage()

    def finish(self, began_s: float, duration_ms: float, tokens: int) -> float:
        """Wait until `duration_ms` after `began_s` (of time.perf_counter); return how long the step took, in ms.

        Only a step that was computed too late takes longer than `duration_ms`.
        """
        overrun_ms = (time.perf_counter() - began_s) * 1e3 - duration_ms
        took_ms, usage = duration_ms + max(0.0, overrun_ms), self.usage
        end_s = began_s + took_ms / 1e3
        sleep_until(end_s)
        self.usage = EmulatedUsage(
            usage.steps + 1,
            usage.busy_ms + took_ms,
            usage.tokens + tokens,
            usage.overruns + (overrun_ms > 0),
            usage.overrun_ms + max(0.0, overrun_ms),
            usage.late_ms + (time.perf_counter() - end_s) * 1e3,
        )
        return took_ms


def sleep_until(moment_s: float) -> None:
    """Sleep until time.perf_counter reaches `moment_s`; as long sleeps end later than short ones, in two pieces."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        time.sleep(left_s - LAST_SLEEP_S if left_s > 2 * LAST_SLEEP_S else left_s)
