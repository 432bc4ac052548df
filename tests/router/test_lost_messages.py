"""Messages between router and workers that are lost, late or doubled: the same ids, and nothing left behind."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, sometimes_right
from tests.fakes.workers import ScriptedWorker
from tests.router.helpers import ask_all, assert_nothing_is_left, make_router, plainly, request, run
from workers.errors import LinkError
from workers.links.faulty import INJECTION_VARIABLE, FaultInjector, FaultyLink, LinkFaults, injector_from
from workers.messages import ReleaseRequest
from workers.router import peer
from workers.router import router as router_module

FOR_EVER = 1e12


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peer, router_module):
        monkeypatch.setattr(module, "CONTROL_DEADLINE_S", 0.02)
    monkeypatch.setattr(peer, "RELEASE_AGAIN_S", 0.001)


class EveryNth(FaultInjector):
    """Befalls every n-th message by one kind of fault after another.

    Hardly ever the steps of one sequence three times on end: for such a one the router takes it to be the cause.
    """

    def __init__(self, every: int, kinds: tuple[str, ...], delay_s: float) -> None:
        super().__init__(lambda: LinkFaults(delay_s=delay_s))
        self.every = every
        self._kinds = itertools.cycle(kinds)
        self._messages = 0

    def next_fault(self) -> tuple[str, LinkFaults]:
        """See `FaultInjector.next_fault`."""
        self._messages += 1
        hit = self.every and self._messages % self.every == 0
        return next(self._kinds) if hit else "", self._read()


@pytest.mark.parametrize(
    ("every", "kinds", "delay_s"),
    [
        (31, ("question lost", "answer lost"), 0.0),
        (2, ("delay",), 0.003),
        (31, ("delay",), 5.0),
        (2, ("double",), 0.0),
        (4, ("double", "delay") * 4 + ("question lost",) + ("delay", "double") * 4 + ("answer lost",), 0.003),
    ],
    ids=["lost", "delayed", "too late", "doubled", "all at once"],
)
def test_lost_late_and_doubled_messages_change_no_id_and_leave_nothing(
    every: int, kinds: tuple[str, ...], delay_s: float
) -> None:
    injector = EveryNth(every, kinds, delay_s)
    asked = [request(number=number, max_tokens=40) for number in range(6)]
    targets = [ScriptedTarget(), ScriptedTarget(worker_id="target-1")]
    drafters = [ScriptedDrafter(sometimes_right(70)), ScriptedDrafter(sometimes_right(70), worker_id="draft-1")]
    workers: list[ScriptedWorker] = [*targets, *drafters]

    async def test() -> None:
        router = make_router(propose_deadline_s=0.04, verify_deadline_s=0.04, draft_ahead=True, max_cohorts=2)

        async def supervise() -> None:
            while True:
                for worker in workers:
                    try:
                        await router.register(worker.registration, FaultyLink(worker, injector))
                    except LinkError:
                        continue
                await asyncio.sleep(0.001)

        supervising = asyncio.create_task(supervise())
        try:
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            injector.every = 0
            await asyncio.sleep(0.1)
            await assert_nothing_is_left(router, *workers)
        finally:
            supervising.cancel()
            await router.close()
        assert [violation for worker in workers for violation in worker.violations] == []

    run(test)


def test_a_release_that_is_lost_is_sent_again() -> None:
    target = ScriptedTarget()

    class LosesFirstRelease:
        """A link that loses the first release of a sequence."""

        lost = False

        async def call(self, message: object, deadline_s: float) -> object:
            """See `workers.links.Link.call`."""
            if isinstance(message, ReleaseRequest) and message.sequence_ids and not self.lost:
                self.lost = True
                raise LinkError("lost")
            return await target.call(message, deadline_s)  # type: ignore[arg-type]

    async def test() -> None:
        router, link = make_router(), LosesFirstRelease()
        await router.register(target.registration, link)  # type: ignore[arg-type]
        await ask_all(router, [request()])
        await asyncio.sleep(0.02)
        assert link.lost
        await assert_nothing_is_left(router, target)
        await router.close()

    run(test)


def test_faults_are_injected_only_where_the_environment_asks_and_only_until_their_end(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    assert injector_from({}) is None
    injector = injector_from({INJECTION_VARIABLE: str(path)})
    assert injector is not None and injector.next_fault()[0] == ""
    path.write_text("{")
    assert injector.next_fault()[0] == ""
    path.write_text(json.dumps({"double": 1.0, "until": FOR_EVER}))
    assert injector.next_fault()[0] == "double"
    path.write_text(json.dumps({"double": 1.0, "until": 1.0}))
    assert injector.next_fault()[0] == ""
