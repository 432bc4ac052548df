"""Targets with too few blocks for all they run: the youngest makes room, the oldest goes on, and no text changes."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import HoldingLink, ScriptedDrafter, ScriptedTarget, Trouble, sometimes_right
from tests.router.helpers import (
    Answer,
    ask,
    ask_all,
    assert_nothing_is_left,
    checks_done,
    in_service,
    make_router,
    plainly,
    request,
    run,
    serving,
    supervised,
    until,
)
from workers.messages import OnlineCheckTotals
from workers.router.router import Router
from workers.router.running import RunningSequence

LONGEST_BLOCKS = 18
"""Of the longest request below, 30 + 42 tokens in blocks of 4."""
shapes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 42) | st.integers(30, 42)), min_size=3, max_size=10)


class Watch:
    """Looks on while a router works: who is preempted, who is placed, and whether the ledgers add up."""

    def __init__(self, router: Router) -> None:
        self.victims: list[int] = []
        self._router = router
        self._placement = router._placement
        self._preempt, self._place = self._placement.preempt, self._placement.place_in_free_room
        self._placement.preempt = self._note_preemption  # type: ignore[method-assign]
        self._placement.place_in_free_room = self._note_placement  # type: ignore[method-assign]

    def _note_preemption(self, running: RunningSequence) -> None:
        [lane] = [lane for lane in self._router._lanes.values() if running in lane.running.values()]
        ages = [other.age for other in lane.running.values()]
        assert running.age == max(ages) and len(ages) > 1, "the youngest goes, and never the last one"
        assert not any(other.is_check for other in lane.running.values()), "checks go first"
        self.victims.append(running.sequence.sequence_id)
        self._preempt(running)
        self.check_ledgers()

    def _note_placement(self, running: RunningSequence) -> bool:
        placed = self._place(running)
        waiting = [other.age for other in self._placement.waiting if other is not running]
        assert not placed or all(running.age < age for age in waiting), "placed before an older one"
        return placed

    def check_ledgers(self) -> None:
        """All promises are within the pools, and add up."""
        for peer in self._router._peers():
            promised = sum(promise.blocks for promise in peer.ledger.reserved.values())
            assert peer.ledger.free_blocks == peer.ledger.total_blocks - promised >= 0

    async def until_done(self, *tasks: "asyncio.Task[Answer]") -> None:
        """Check the ledgers at every turn of the loop until the tasks are done."""
        while not all(task.done() for task in tasks):
            self.check_ledgers()
            await asyncio.sleep(0)


async def ask_and_leave(router: Router, number: int, shape: tuple[int, int], leave_after: int | None) -> Answer:
    """Ask, and leave after so many chunks; None stays to the end."""
    asked, answer = request(*shape, number), Answer()
    task = asyncio.create_task(ask(router, asked, into=answer))
    if leave_after is not None:
        await until(lambda: task.done() or len(answer.chunks) >= leave_after)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert answer.failure is None
    assert answer.tokens == plainly(asked)[: len(answer.tokens)]
    if leave_after is None:
        assert answer.tokens == plainly(asked)
    return answer


@given(
    shapes=shapes,
    leaving=st.dictionaries(st.integers(0, 9), st.integers(0, 5), max_size=3),
    blocks=st.integers(LONGEST_BLOCKS, 26),
    drafter_blocks=st.integers(3, 30),
    percent=st.sampled_from([0, 50, 100]),
    k=st.integers(0, 6),
    drafter_troubles=st.dictionaries(st.integers(0, 20), st.sampled_from(Trouble), max_size=4),
    target_troubles=st.dictionaries(
        st.integers(0, 30), st.sampled_from([Trouble.FORGET, Trouble.STALE, Trouble.DEATH]), max_size=2
    ),
    limits=st.fixed_dictionaries(
        {
            "prefill_chunk_tokens": st.sampled_from([3, 16, 512]),
            "max_batch_sequences": st.sampled_from([1, 3, 32]),
            "check_share": st.sampled_from([0.0, 1.0]),
        }
    ),
    targets=st.integers(1, 2),
)
@settings(max_examples=50)
def test_whatever_happens_every_text_is_that_of_plain_decoding_and_everything_ends(
    shapes: list[tuple[int, int]],
    leaving: dict[int, int],
    blocks: int,
    drafter_blocks: int,
    percent: int,
    k: int,
    drafter_troubles: dict[int, Trouble],
    target_troubles: dict[int, Trouble],
    limits: dict[str, int],
    targets: int,
) -> None:
    first = ScriptedTarget(total_blocks=blocks, troubles=target_troubles)
    first.token_ms = 0.1
    others = [ScriptedTarget(f"target-{number}", total_blocks=blocks) for number in range(1, targets)]
    drafter = ScriptedDrafter(sometimes_right(percent), total_blocks=drafter_blocks, troubles=drafter_troubles)
    workers = [first, *others, drafter]

    async def test() -> None:
        async with serving(*workers, max_draft_tokens=k, **limits) as router, supervised(router, *workers):
            watch = Watch(router)
            tasks = [
                asyncio.create_task(ask_and_leave(router, number, shape, leaving.get(number)))
                for number, shape in enumerate(shapes)
            ]
            await watch.until_done(*tasks)
            await asyncio.gather(*tasks)
            await checks_done(router)
            assert (await router.status()).totals.preemptions == len(watch.victims)
            await until(lambda: in_service(router) == {worker.worker_id for worker in workers})
            await assert_nothing_is_left(router, *workers)

    run(test)


def test_sequences_that_would_not_have_fitted_whole_run_together_and_the_oldest_is_never_interrupted() -> None:
    # 8 + 56 tokens are 16 blocks of 20: by its budget each sequence would have to run alone.
    asked = [request(8, 56, number) for number in range(4)]
    target, drafter = ScriptedTarget(total_blocks=20), ScriptedDrafter(sometimes_right(60), total_blocks=20)
    ended: list[int] = []

    async def ask_and_note(router: Router, number: int) -> Answer:
        answer = await ask(router, asked[number])
        ended.append(number)
        return answer

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=3) as router:
            watch = Watch(router)
            tasks = [asyncio.create_task(ask_and_note(router, number)) for number in range(4)]
            most_running = 0
            while not all(task.done() for task in tasks):
                most_running = max(most_running, len(router._running()))
                await asyncio.sleep(0)
            assert [task.result().tokens for task in tasks] == list(map(plainly, asked))
            assert most_running >= 3
            assert ended == [0, 1, 2, 3]
            oldest = router._next_sequence_id - 3
            assert oldest not in watch.victims and len(watch.victims) >= 2
            assert (await router.status()).totals.preemptions == len(watch.victims)
            await assert_nothing_is_left(router, target, drafter)

    run(test)


def test_a_preemption_is_a_debug_line_without_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "workers.router.placement")

    async def test() -> None:
        async with serving(ScriptedTarget(total_blocks=20)) as router:
            await ask_all(router, [request(8, 56, number) for number in range(3)])

    run(test)

    assert [record for record in caplog.records if "makes room on target target-0 with" in record.getMessage()]


def test_what_was_preempted_waits_for_no_queue_timeout_and_comes_before_new_requests() -> None:
    asked = [request(8, 56, 0), request(8, 56, 1), request(4, 4, 2)]
    target = ScriptedTarget(total_blocks=16, delay_s=0.002)
    ended: list[int] = []

    async def test() -> None:
        async with serving(target, max_draft_tokens=0, queue_timeout_s=0.05) as router:
            watch = Watch(router)

            async def ask_and_note(number: int) -> Answer:
                answer = await ask(router, asked[number])
                ended.append(number)
                return answer

            old = [asyncio.create_task(ask_and_note(number)) for number in range(2)]
            await until(lambda: bool(watch.victims))
            preempted = asyncio.get_running_loop().time()
            new = asyncio.create_task(ask_and_note(2))
            assert [answer.tokens for answer in await asyncio.gather(*old)] == list(map(plainly, asked[:2]))
            assert asyncio.get_running_loop().time() - preempted > 0.05
            answer = await new
            # It found no room for as long as an older one waited.
            assert answer.failure is not None and answer.failure.status == 503
            assert ended[0] == 2 and ended[1:] == [0, 1]
            await assert_nothing_is_left(router, target)

    run(test)


def test_what_was_preempted_waits_only_so_long_for_a_target_if_the_last_one_dies() -> None:
    target = ScriptedTarget(total_blocks=16, delay_s=0.001)

    async def test() -> None:
        async with serving(target, max_draft_tokens=0, queue_timeout_s=0.02) as router:
            watch = Watch(router)
            tasks = [asyncio.create_task(ask(router, request(8, 56, number))) for number in range(2)]
            await until(lambda: bool(watch.victims))
            router.unregister("target-0")
            for answer in await asyncio.gather(*tasks):
                assert answer.failure is not None and answer.failure.status == 503

    run(test)


def test_a_request_that_no_target_could_ever_hold_is_refused_at_once_and_holds_up_nobody() -> None:
    target = ScriptedTarget(total_blocks=10)

    async def test() -> None:
        router = make_router(queue_timeout_s=5)
        early = asyncio.create_task(ask(router, request(8, 33, 1)))  # no target is known yet: it waits
        fitting = asyncio.create_task(ask(router, request(8, 32, 2)))
        await until(lambda: len(router._placement.waiting) == 2)
        await router.register(target.registration, target)
        assert (await fitting).tokens == plainly(request(8, 32, 2))
        assert (await ask(router, request(8, 32, 3))).tokens == plainly(request(8, 32, 3))
        late = await ask(router, request(8, 33, 4))
        assert late.failure is not None
        assert (late.failure.status, late.failure.code) == (400, "context_length_exceeded")
        assert "41 tokens" in late.failure.message
        assert not early.done()
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        await assert_nothing_is_left(router, target)
        await router.close()

    run(test)


def test_a_full_queue_still_refuses_and_preempted_sequences_count_in_it() -> None:
    target = ScriptedTarget(total_blocks=16, delay_s=0.001)

    async def test() -> None:
        async with serving(target, max_draft_tokens=0, max_waiting_sequences=1) as router:
            watch = Watch(router)
            tasks = [asyncio.create_task(ask(router, request(8, 56, number))) for number in range(2)]
            await until(lambda: bool(watch.victims))
            assert (await router.status()).waiting == 1
            refused = await ask(router, request(4, 4, 3))
            assert refused.failure is not None and refused.failure.status == 429
            for number, answer in enumerate(await asyncio.gather(*tasks)):
                assert answer.tokens == plainly(request(8, 56, number))

    run(test)


def test_an_online_check_is_the_first_to_go_when_blocks_run_out_and_is_made_later() -> None:
    # The check's own 16 blocks and the client's 16 do not fit into 20; each begins with 2.
    target, drafter = ScriptedTarget(total_blocks=20, delay_s=0.001), ScriptedDrafter()

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0, max_draft_tokens=1) as router:
            watch = Watch(router)
            await ask(router, request(8, 56, 1))
            await until(lambda: any(running.is_check for running in router._running()))
            assert (await ask(router, request(8, 56, 2))).tokens == plainly(request(8, 56, 2))
            totals = await checks_done(router)
            assert watch.victims == []
            assert (await router.status()).totals.preemptions == 0
            await assert_nothing_is_left(router, target, drafter)
            return totals

    totals = run(test)
    assert (totals.checked, totals.mismatched, totals.dropped) == (2, 0, 0)
    assert totals.postponed >= 1


@pytest.mark.parametrize("held_step", [0, 1, 3])
@pytest.mark.parametrize("drafted", [False, True])
def test_b09_a_late_answer_to_a_sequence_that_was_put_in_line_again_is_discarded(held_step: int, drafted: bool) -> None:
    asked = request(9, 20)
    target, drafter = ScriptedTarget(), ScriptedDrafter(sometimes_right(80))
    link = HoldingLink(target, held_step)

    async def test() -> None:
        router = make_router(prefill_chunk_tokens=4, max_draft_tokens=4 if drafted else 0)
        await router.register(target.registration, link)
        await router.register(drafter.registration, drafter)
        task = asyncio.create_task(ask(router, asked))
        await link.holding.wait()
        # It finds room on the same target at once, while the answer to its earlier life is still on its way.
        [running] = router._running()
        epoch, length = running.sequence.epoch, running.sequence.length
        router._on_preempted(running)
        assert router._running() == [running]
        assert running.sequence.epoch > epoch
        link.release.set()
        while target.steps == held_step + 1:
            await asyncio.sleep(0)
        assert running.sequence.length == length
        assert (await task).tokens == plainly(asked)
        assert target.violations == drafter.violations == []
        await assert_nothing_is_left(router, target, drafter)
        await router.close()

    run(test)


@pytest.mark.parametrize("drafter_blocks", [2, 4, 7, 10, 16])
def test_a_drafter_without_blocks_costs_drafts_and_nothing_else(drafter_blocks: int) -> None:
    asked = [request(6, 26, number) for number in range(3)]
    target, drafter = ScriptedTarget(), ScriptedDrafter(total_blocks=drafter_blocks)

    async def test() -> None:
        async with serving(target, drafter) as router:
            watch = Watch(router)
            answers = await ask_all(router, asked)
            assert [answer.tokens for answer in answers] == list(map(plainly, asked))
            assert watch.victims == []
            drafted = sum(answer.usage.draft_tokens for answer in answers)
            assert (drafted > 0) is (drafter_blocks > 3)
            assert any(answer.usage.fallback_rounds for answer in answers)
            await assert_nothing_is_left(router, target, drafter)

    run(test)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("workers.router").setLevel(logging.ERROR)
    yield
    logging.getLogger("workers.router").setLevel(logging.NOTSET)
