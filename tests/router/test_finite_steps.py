"""A target whose logits are not finite: its requests fail clearly, and it is replaced before many have."""

import pytest

from tests.fakes import HeldSequence, ScriptedDrafter, ScriptedTarget
from tests.router.helpers import ask, assert_nothing_is_left, in_service, plainly, request, run, serving, until
from workers.errors import UnfitWorkerError
from workers.messages import VerifiedItem, VerifyItem
from workers.router.finite_steps import MOST_FAULTY_STEPS


class BrokenTarget(ScriptedTarget):
    """Answers everything it draws with a fault."""

    def _verified(self, item: VerifyItem, held: HeldSequence | None, epochs_late: int) -> VerifiedItem:
        verified = super()._verified(item, held, epochs_late)
        return VerifiedItem(item.sequence_id, item.epoch, fault="not finite") if item.sample else verified


def test_a_target_that_gives_no_finite_logits_is_not_taken_again_and_its_successor_serves() -> None:
    broken, successor, drafter = BrokenTarget(), ScriptedTarget("target-1"), ScriptedDrafter()

    async def test() -> None:
        async with serving(broken, drafter) as router:
            for number in range(MOST_FAULTY_STEPS):
                assert "target-0" in in_service(router)
                # A long prompt: steps that only read say nothing.
                answer = await ask(router, request(length=600, max_tokens=4, number=number))
                assert answer.failure is not None and answer.failure.code == "sequence_fault"
            await until(lambda: in_service(router) == {"draft-0"})
            with pytest.raises(UnfitWorkerError):
                await router.register(broken.registration, broken)
            await router.register(successor.registration, successor)
            assert (await ask(router, request())).tokens == plainly(request())
            await assert_nothing_is_left(router, successor, drafter)

    broken.context_length = successor.context_length = 1024
    run(test)


def test_requests_that_are_at_fault_themselves_cost_no_target() -> None:
    bad = [request(number=number, max_tokens=30) for number in range(1, 9)]
    good = request(max_tokens=30)
    target, drafter = ScriptedTarget(), ScriptedDrafter()
    target.faulty_first_token = int(bad[0].prompt[0])
    asked = [bad[0], bad[0], good] * 3

    async def test() -> None:
        async with serving(target, drafter) as router:
            answers = [await ask(router, each) for each in asked]
            assert [answer.failure is None for answer in answers] == [False, False, True] * 3
            assert in_service(router) == {"target-0", "draft-0"}
            await assert_nothing_is_left(router, target, drafter)

    run(test)
