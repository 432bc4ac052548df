"""What the router tells those who decide how many workers there should be."""

import asyncio
from dataclasses import replace

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, never_right
from tests.router.helpers import ask, ask_all, make_router, request, run, serving, turns, until
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.messages import DrafterPoolLoad, Resumption, RoundTotals, RouterLoad, TokenChunk, TokenIds, token_ids
from workers.router.load_meter import LoadMeter
from workers.router.roster import Roster
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence


def test_running_and_waiting_sequences_drafters_and_kv_are_counted_until_the_clients_leave() -> None:
    async def test() -> tuple[RouterLoad, RouterLoad]:
        target, drafter = ScriptedTarget(total_blocks=40, delay_s=0.01), ScriptedDrafter(total_blocks=10)
        async with serving(target, drafter, max_draft_tokens=2, max_running_sequences=2) as router:
            clients = [asyncio.create_task(ask(router, request(20, 60, number))) for number in range(3)]
            await until(lambda: router.load().waiting == 1)
            busy = router.load()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await turns()
            return busy, router.load()

    busy, idle = run(test)

    assert (busy.running, busy.waiting, busy.undrafted) == (2, 1, 1)
    assert busy.drafter_pools == (DrafterPoolLoad("toy-draft", 1, 0, 1),)
    assert 10 / 40 <= busy.kv_use[0] <= 1
    assert busy.queue_wait_ms is not None
    assert (idle.running, idle.waiting, idle.kv_use) == (0, 0, (0.0,))


def test_times_and_shares_are_those_of_the_rounds() -> None:
    async def test() -> RouterLoad:
        async with serving(ScriptedTarget(), ScriptedDrafter(never_right), max_draft_tokens=3) as router:
            await ask_all(router, [request(max_tokens=40, number=number) for number in range(4)])
            return router.load()

    load = run(test)

    assert load.verifications == 160
    assert load.accepted_length == 1
    assert 2.5 < load.draft_tokens <= 3
    assert load.ttft_ms is not None and load.itl_ms is not None
    assert 0 < load.exposed_draft_wait < 1


def test_only_the_last_seconds_count() -> None:
    now = 1_000.0
    meter = LoadMeter(10.0, lambda: now)
    running = RunningSequence(Sequence(1, request(), _no_detokenizer), deadline_s=0.0, admitted_s=now - 4.0)
    running.left_line_s = now - 1.0

    def report(totals: RoundTotals) -> RouterLoad:
        return meter.report([], [], [], Roster(), totals)

    meter.observe(running, TokenChunk(token_ids([1]), None))
    now += 0.5
    meter.observe(running, TokenChunk(token_ids([1, 2, 3, 4, 5]), None))
    early = report(RoundTotals(verifications=10, draft_tokens=40, wall_ms=100.0, draft_wait_ms=90.0))
    assert (early.ttft_ms, early.queue_wait_ms, early.itl_ms) == pytest.approx((4_000, 3_000, 100))
    assert (early.draft_tokens, early.exposed_draft_wait) == (4.0, 0.9)

    now += 11.0
    late = report(
        RoundTotals(verifications=30, draft_tokens=60, looked_up_tokens=10, wall_ms=200.0, draft_wait_ms=90.0)
    )
    assert (late.ttft_ms, late.queue_wait_ms, late.itl_ms) == (None, None, None)
    assert (late.draft_tokens, late.exposed_draft_wait, late.verifications) == (0.5, 0.0, 20)


def test_a_request_that_another_router_began_says_nothing_of_the_time_to_the_first_token() -> None:
    meter = LoadMeter(10.0, lambda: 1_000.0)
    begun = replace(request(), resumption=Resumption(token_ids([1])))
    running = RunningSequence(Sequence(1, begun, _no_detokenizer), deadline_s=0.0, admitted_s=996.0)
    meter.observe(running, TokenChunk(token_ids([2]), None))
    assert meter.report([], [], [], Roster(), RoundTotals()).ttft_ms is None


def test_a_router_without_workers_and_requests_has_no_load() -> None:
    load = run(_load_of_an_idle_router)
    assert RouterLoad.from_metrics(load.as_metrics()) == load
    assert (load.streams, load.kv_use, load.drafter_pools, load.ttft_ms) == (0, (), (), None)


async def _load_of_an_idle_router() -> RouterLoad:
    return make_router().load()


def _no_detokenizer(prompt: TokenIds) -> IncrementalDetokenizer:
    raise NotImplementedError
