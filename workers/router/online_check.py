"""The online check: some finished requests are decoded again, without drafts, where the targets have room to spare."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.decoding.comparison import Difference, first_difference
from workers.messages import (
    GenerationFailed,
    GenerationRequest,
    OnlineCheckTotals,
    SamplingParams,
    SpeculationOptions,
    SpeculationUsage,
    TokenIds,
    Verification,
)
from workers.router.config import RouterConfig
from workers.router.detached import detached_task
from workers.router.running import RunningSequence

logger = logging.getLogger(__name__)


def is_chosen(request_id: str, share: float) -> bool:
    """Whether the request is among the share (0 to 1) to check: a hash of its id, the same in every process."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _without_texts(sampling: SamplingParams) -> SamplingParams:
    """A schema or an expression is the client's text."""
    if sampling.rules is None or sampling.rules.grammar is None:
        return sampling
    grammar = replace(sampling.rules.grammar, source="...")
    return replace(sampling, rules=replace(sampling.rules, grammar=grammar))


def is_comparable(request: GenerationRequest, usage: SpeculationUsage, deployment_verification: Verification) -> bool:
    """Whether decoding without drafts must give the very ids that `usage` tells of.

    Ratio verification at a temperature above 0 keeps the distribution, not the ids. Without drafts there was nothing
    that could have changed them.
    """
    verification = request.speculation.verification or deployment_verification
    by_id = verification is Verification.COUPLED or request.sampling.temperature == 0
    return by_id and usage.draft_tokens > 0


@dataclass(frozen=True, slots=True)
class Check:
    """A finished request, the ids that it was answered with, and when its check must be over (monotonic clock)."""

    request: GenerationRequest
    answer: TokenIds
    drafter: str | None
    deadline_s: float

    def plain_request(self) -> GenerationRequest:
        """Return the same request without drafts, and without what does not bear on its ids."""
        # One token more than the answer has, lest one that should have gone on pass; more would only reserve KV.
        max_tokens = min(self.request.stop.max_tokens, len(self.answer) + 1)
        return replace(
            self.request,
            request_id=f"{self.request.request_id}-check",
            stop=replace(self.request.stop, max_tokens=max_tokens),
            speculation=SpeculationOptions(enabled=False),
            trace_context={},
            resumption=None,
            logprobs=None,
            prompt_logprobs=False,
        )


class OnlineChecks:
    """Runs one check at a time, in the row of one sequence, and puts it off as soon as a client needs the room.

    `place` starts a request on idle capacity, or returns None if there is none; `withdraw` takes a sequence out of
    service and leaves its room to the caller; `end` does so and hands the room to whoever waits.
    """

    def __init__(
        self,
        config: RouterConfig,
        place: Callable[[GenerationRequest, float], RunningSequence | None],
        withdraw: Callable[[RunningSequence], None],
        end: Callable[[RunningSequence], None],
    ) -> None:
        self._config = config
        self._place = place
        self._withdraw = withdraw
        self._end = end
        self._pending: deque[Check] = deque()
        self._current: tuple[Check, RunningSequence, asyncio.Task[None]] | None = None
        self._totals = OnlineCheckTotals()
        self._stopped = False

    @property
    def totals(self) -> OnlineCheckTotals:
        """What the checks found so far."""
        self._drop_late()
        return replace(self._totals, pending=len(self._pending) + (self._current is not None))

    def offer(self, running: RunningSequence) -> None:
        """Note a client's sequence that has ended, if it is to be checked."""
        sequence, request = running.sequence, running.sequence.request
        if running.is_check or sequence.finish_reason is None or self._stopped:
            return
        if not is_chosen(request.request_id, self._config.check_share):
            return
        if not is_comparable(request, sequence.usage(), self._config.verification):
            self._count(skipped=1)
            return
        self._drop_late()
        if len(self._pending) >= self._config.check_max_pending:
            self._count(dropped=1)
            return
        answer = sequence.tokens(len(request.prompt), sequence.length)
        deadline_s = time.monotonic() + self._config.check_timeout_s
        self._pending.append(Check(request, answer, sequence.drafter_name, deadline_s))

    def start(self) -> None:
        """Begin the next check if none runs and there is room; called whenever room may have become free."""
        self._drop_late()
        if self._current is not None or not self._pending:
            return
        check = self._pending[0]
        running = self._place(check.plain_request(), check.deadline_s)
        if running is not None:
            self._pending.popleft()
            self._current = check, running, detached_task(self._run(check, running))

    def make_room(self) -> bool:
        """Put off the check that runs, to be begun again later; whether that has freed anything."""
        if self._current is None or self._current[1].ended:
            return False
        check, running, task = self._current
        self._current = None
        task.cancel()
        self._withdraw(running)
        self._pending.appendleft(check)
        self._count(postponed=1)
        return True

    def stop(self) -> None:
        """Drop all checks, for good."""
        self._stopped = True
        self.make_room()
        self._count(dropped=len(self._pending))
        self._pending.clear()

    async def _run(self, check: Check, running: RunningSequence) -> None:
        try:
            await self._compare(check, running)
        finally:
            # Put off, the check has been taken out of service already, and another may run by now.
            if self._current is not None and self._current[1] is running:
                self._current = None
                self._end(running)
                self.start()

    async def _compare(self, check: Check, running: RunningSequence) -> None:
        """Compare the tokens as they come, up to the first difference: behind it the two have other histories."""
        seen = 0
        while True:
            event = await running.next_event()
            if isinstance(event, GenerationFailed):
                self._count(dropped=1)
                if event.code != "timeout":
                    logger.warning("online check of request %s failed: %s", check.request.request_id, event.message)
                return
            ended = event.finish_reason is not None
            expected = check.answer[seen : len(check.answer) if ended else seen + len(event.token_ids)]
            difference = first_difference(expected, event.token_ids, seen)
            seen += len(event.token_ids)
            if difference is not None or ended:
                self._conclude(check, difference, seen)
                return

    def _conclude(self, check: Check, difference: Difference | None, compared_tokens: int) -> None:
        self._count(checked=1, compared_tokens=compared_tokens, mismatched=int(difference is not None))
        if difference is not None:
            # Ids and options only: log lines hold no text of clients.
            logger.error(
                "online check: request %s differs at token %d of its answer: id %s with drafts, id %s without; "
                "drafter %s, prompt tokens %d, %s",
                check.request.request_id,
                difference.position,
                "none" if difference.first is None else difference.first,
                "none" if difference.second is None else difference.second,
                check.drafter,
                len(check.request.prompt),
                _without_texts(check.request.sampling),
            )

    def _drop_late(self) -> None:
        if not self._pending:
            return
        now = time.monotonic()
        kept = [check for check in self._pending if check.deadline_s > now]
        self._count(dropped=len(self._pending) - len(kept))
        self._pending = deque(kept)

    def _count(self, **counts: int) -> None:
        sums = {name: getattr(self._totals, name) + count for name, count in counts.items()}
        self._totals = replace(self._totals, **sums)
