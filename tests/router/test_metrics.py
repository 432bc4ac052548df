"""What the router's metrics say of ends, queues, failures and checks."""

import asyncio
from dataclasses import replace

from tests.fakes import ScriptedDrafter, ScriptedTarget, never_right
from tests.router.helpers import ask, ask_all, checks_done, request, run, serving, until
from workers.messages import MetricsSnapshot, Resumption, TokenChunk
from workers.router.metrics_recorder import OUTCOMES


def outcomes(snapshot: MetricsSnapshot) -> dict[str, float]:
    """How many sequences ended in each way, where any did."""
    return {series.labels[0]: series.value for series in snapshot.of("requests") if series.value}


def test_every_end_is_counted_by_its_outcome() -> None:
    async def test() -> tuple[MetricsSnapshot, MetricsSnapshot]:
        async with serving(ScriptedTarget(), max_running_sequences=1, max_waiting_sequences=0) as router:
            before = await router.metrics()
            leaving = router.generate(request(max_tokens=500))
            await anext(leaving)
            assert (await ask(router, request(number=1))).failure is not None
            await leaving.aclose()  # type: ignore[attr-defined]
            await ask(router, request(number=2))
            await ask(router, request(number=3, max_tokens=10**6))
            await ask(router, request(number=4, timeout_s=0.0))
            return before, await router.metrics()

    before, after = run(test)
    assert {series.labels[0] for series in before.of("requests")} == set(OUTCOMES)
    assert outcomes(before) == {}
    assert outcomes(after) == {
        "cancelled": 1, "overloaded": 1, "length": 1, "context_length_exceeded": 1, "timeout": 1
    }  # fmt: skip


def test_sequences_that_wait_are_told_from_those_that_run_and_their_wait_is_measured() -> None:
    async def test() -> tuple[MetricsSnapshot, MetricsSnapshot]:
        async with serving(ScriptedTarget(), max_running_sequences=1) as router:
            first = router.generate(request(max_tokens=500))
            await anext(first)
            second = asyncio.create_task(ask(router, request(number=1)))
            await until(lambda: bool(router._placement.waiting))
            during = await router.metrics()
            await first.aclose()  # type: ignore[attr-defined]
            await second
            return during, await router.metrics()

    during, after = run(test)
    assert [during.total(f"num_requests_{state}") for state in ("running", "waiting")] == [1, 1]
    assert [after.total(f"num_requests_{state}") for state in ("running", "waiting")] == [0, 0]
    (queued,) = after.of("request_queue_seconds")
    assert sum(queued.buckets) == 2
    assert queued.value > 0


def test_the_first_tokens_behind_those_of_another_router_are_not_a_clients_first_tokens() -> None:
    async def test() -> tuple[MetricsSnapshot, int]:
        async with serving(ScriptedTarget()) as router:
            whole = [event async for event in router.generate(request(max_tokens=6)) if isinstance(event, TokenChunk)]
            begun = replace(request(max_tokens=6), resumption=Resumption(whole[0].token_ids))
            rest = [event async for event in router.generate(begun) if isinstance(event, TokenChunk)]
            assert [event.token_ids.tolist() for event in rest] == [event.token_ids.tolist() for event in whole[1:]]
            return await router.metrics(), len(whole)

    snapshot, chunks = run(test)
    (first,), (gaps,) = snapshot.of("time_to_first_token_seconds"), snapshot.of("inter_chunk_seconds")
    assert sum(first.buckets) == 1
    assert sum(gaps.buckets) == (chunks - 1) + (chunks - 2)


def test_a_drafter_that_never_pays_shows_as_benched_and_its_rounds_as_fallbacks() -> None:
    drafter = ScriptedDrafter(never_right)

    async def test() -> tuple[MetricsSnapshot, int]:
        async with serving(ScriptedTarget(), drafter, max_draft_tokens=4, bench_drafters=True) as router:
            answers = await ask_all(router, [request(max_tokens=60, number=number) for number in range(3)])
            return await router.metrics(), sum(answer.usage.fallback_rounds for answer in answers)

    snapshot, fallback_rounds = run(test)
    name, worker_id = drafter.registration.name, drafter.registration.worker_id
    assert snapshot.total("drafter_benched", name, worker_id) == 1
    assert snapshot.total("drafter_benchings", name) >= 1
    assert snapshot.total("fallback_rounds") == fallback_rounds > 0


def test_a_failed_worker_is_counted_and_its_levels_are_gone() -> None:
    drafter = ScriptedDrafter()

    async def test() -> tuple[MetricsSnapshot, MetricsSnapshot]:
        async with serving(ScriptedTarget(), drafter) as router:
            before = await router.metrics()
            drafter.die()
            await ask(router, request())
            return before, await router.metrics()

    before, after = run(test)
    assert (before.total("workers", "draft"), after.total("workers", "draft")) == (1, 0)
    assert (before.total("worker_failures", "draft"), after.total("worker_failures", "draft")) == (0, 1)
    assert before.total("kv_blocks_total", "draft") == drafter.registration.total_blocks
    assert [series for series in after.of("kv_blocks_total") if series.labels[0] == "draft"] == []


def test_without_any_worker_the_lack_of_a_target_is_a_number() -> None:
    async def test() -> MetricsSnapshot:
        async with serving() as router:
            return await router.metrics()

    assert [(series.labels, series.value) for series in run(test).of("workers")] == [(("draft",), 0), (("target",), 0)]


def test_online_checks_count_as_checks_and_as_nothing_else() -> None:
    async def test() -> tuple[MetricsSnapshot, MetricsSnapshot]:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=1.0) as router:
            await ask(router, request(max_tokens=12))
            before = await router.metrics()
            await checks_done(router)
            return before, await router.metrics()

    before, after = run(test)
    assert after.total("online_check_checked") == 1
    assert after.total("online_check_mismatched") == 0
    assert after.total("online_check_compared_tokens") == 12
    for metric in ("generation_tokens", "verifications", "requests", "request_queue_seconds"):
        assert after.of(metric) == before.of(metric)
    assert after.total("generation_tokens") == 12
