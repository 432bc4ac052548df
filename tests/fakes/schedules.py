"""A scheduler that owns every message between a router and scripted workers, and an event loop whose time it owns.

Nothing runs by chance: whenever the router waits, one of the things that could happen next does, as a script says.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from tests.fakes.virtual_time import VirtualLoop
from tests.fakes.workers import ScriptedWorker
from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.messages import ProposeResponse, ReleaseRequest, VerifyResponse, WorkerRequest, WorkerResponse
from workers.router.peer import RELEASE_TRIES

T = TypeVar("T")
DELAY_S = 11.0
"""Longer than drafts are waited for."""


@dataclass(eq=False)
class Call:
    """A message on its way, numbered in the order of sending, and its answer once there is one."""

    number: float
    message: WorkerRequest
    waits: asyncio.Future[WorkerResponse | None]
    answer: WorkerResponse | LinkError | None = None

    def end(self, outcome: "WorkerResponse | LinkError | Exception | None") -> None:
        """Let the sender have it, if it still waits."""
        if self.waits.done():
            return
        if isinstance(outcome, Exception):
            self.waits.set_exception(outcome)
        else:
            self.waits.set_result(outcome)


@dataclass
class OwnedLink:
    """A link whose messages lie still until the schedule moves them. The worker reads them in the order of sending."""

    worker: ScriptedWorker
    sent: deque[Call] = field(default_factory=deque)
    answered: list[Call] = field(default_factory=list)
    earlier: WorkerResponse | None = None
    failures: int = 0
    numbers: ClassVar[Iterator[int]] = itertools.count()

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        if self.worker.dead:
            raise LinkClosedError("the worker is gone")
        call = Call(next(self.numbers), message, asyncio.get_running_loop().create_future())
        self.sent.append(call)
        return await call.waits

    def read_next(self, times: int = 1) -> None:
        """The worker reads the next message, as often as it came, and answers."""
        call = self.sent.popleft()
        for _ in range(times):
            try:
                call.answer = _result(self.worker.call(call.message, 1.0))
            except LinkError as error:
                call.answer = error
        self.answered.append(call)

    def bring(self, call: Call) -> None:
        """The answer arrives."""
        self.answered.remove(call)
        if isinstance(call.answer, ProposeResponse | VerifyResponse):
            self.earlier = call.answer
        call.end(call.answer)

    def bring_earlier(self, call: Call) -> None:
        """What arrives is the answer to an earlier message once more; that to this one is lost."""
        self.answered.remove(call)
        call.end(self.earlier)

    def lose(self, call: Call) -> None:
        """The message, or its answer, is lost."""
        (self.answered if call in self.answered else self.sent).remove(call)
        self.give_up(call)

    def give_up(self, call: Call) -> None:
        """The sender waits no longer; the message is under way yet, and will be read."""
        self.failures += not call.waits.done()
        call.end(DeadlineExceededError("no answer in time"))

    def die(self) -> None:
        """The worker dies, and all that was under way with it."""
        self.worker.die()
        self.failures += 1
        for call in [*self.sent, *self.answered]:
            call.end(LinkClosedError("the worker is gone"))
        self.sent.clear()
        self.answered.clear()

    def is_repeatable(self, call: Call) -> bool:
        """Whether an earlier answer could be taken for that to this message."""
        now, before = call.answer, self.earlier
        if not isinstance(now, ProposeResponse | VerifyResponse) or type(now) is not type(before):
            return False
        return [item.sequence_id for item in now.items] == [item.sequence_id for item in before.items]  # type: ignore[union-attr]


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class Schedule:
    """Moves the messages of `links`. Its n-th decision is the n-th number of `script`, then always 0: the plain course.

    `options` tells how many there were to choose from each time. At most `faults` times something goes wrong, and never
    are as many releases lost as are sent.
    """

    def __init__(
        self, loop: VirtualLoop, links: Sequence[OwnedLink], script: Sequence[int], faults: int, deaths: bool = False
    ) -> None:
        self.options: list[int] = []
        self._loop, self._links, self._script = loop, links, script
        self._faults_left = faults
        self._deaths = deaths
        self._lost_releases = 0
        loop.when_idle = self._act

    @property
    def is_quiet(self) -> bool:
        """Whether no message is under way."""
        return not any(link.sent or link.answered for link in self._links)

    def ends_well(self) -> None:
        """From now on nothing goes wrong any more."""
        self._faults_left = 0
        self._script = ()

    def _act(self) -> bool:
        if self.is_quiet:
            return False
        plain, faults = list(self._plain_acts()), []
        if self._faults_left:
            faults = list(self._faulty_acts())
        acts = plain + faults
        position, count = len(self.options), len(acts)
        self.options.append(count)
        chosen = self._script[position] % count if position < len(self._script) else 0
        self._faults_left -= chosen >= len(plain)
        acts[chosen]()
        return True

    def _plain_acts(self) -> Iterator[Callable[[], None]]:
        """Answers arrive, in any order, and messages are read, in order; of all of them, the oldest is plainly next."""
        acts = [(call.number, partial(link.bring, call)) for link in self._links for call in link.answered]
        acts += [(link.sent[0].number, link.read_next) for link in self._links if link.sent]
        return (act for _, act in sorted(acts, key=lambda each: each[0]))

    def _faulty_acts(self) -> Iterator[Callable[[], None]]:
        for link in self._links:
            for call in link.answered:
                if self._may_lose(call):
                    yield partial(self._lose, link, call)
                if link.is_repeatable(call):
                    yield partial(link.bring_earlier, call)
            if link.sent:
                first = link.sent[0]
                yield partial(link.read_next, 2)
                if self._may_lose(first):
                    yield partial(self._lose, link, first)
                if not first.waits.done():
                    yield partial(link.give_up, first)
            if self._deaths and not link.worker.dead:
                yield link.die
            if oldest := [*link.answered, *link.sent][:1]:
                yield partial(self._delay, oldest[0])

    def _may_lose(self, call: Call) -> bool:
        return not isinstance(call.message, ReleaseRequest) or self._lost_releases < RELEASE_TRIES - 1

    def _lose(self, link: OwnedLink, call: Call) -> None:
        self._lost_releases += isinstance(call.message, ReleaseRequest)
        link.lose(call)

    def _delay(self, call: Call) -> None:
        """Time passes, and the next message to be sent goes before this one."""
        self._loop.now_s += DELAY_S
        call.number += 1.5


def every_script(run: Callable[[Sequence[int]], Sequence[int]], deviations: int) -> int:
    """Run every script that differs from the plain course in at most `deviations` decisions; return how many.

    `run` returns the number of options of each decision that it took.
    """
    pending: list[tuple[tuple[int, ...], int]] = [((), deviations)]
    ran = 0
    while pending:
        script, left = pending.pop()
        options = run(script)
        ran += 1
        if left:
            for position in range(len(script), len(options)):
                plain = script + (0,) * (position - len(script))
                pending += [((*plain, choice), left - 1) for choice in range(1, options[position])]
    return ran
