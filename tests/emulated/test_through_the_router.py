"""The real router over synthetic workers: exact ids, the acceptance asked for, no leaks, and faults that show."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.router_service import (
    LANGUAGE,
    SIZE,
    Answer,
    Clients,
    DrafterLayout,
    ServiceLayout,
    WrongTextError,
    ask_all,
    check,
    no_detokenizer,
    registration,
    router_config,
    serving,
    traffic,
)
from deployments.in_process import registration as registration_of_engine
from tests.engine.whole_rounds import generate, prompts, request, run_all
from tests.in_process import load, save_byte_llama, save_drafters
from tests.router.helpers import run_in_real_time
from workers.drafters.model_drafter import ModelDrafter
from workers.emulated.language import AcceptanceProfile, synthetic_text
from workers.emulated.stretched import EmulatedDrafter, EmulatedTarget
from workers.emulated.target import SyntheticTarget
from workers.emulated.thread_link import ThreadLink
from workers.emulated.timing import DrafterTiming, TargetTiming
from workers.engine.verifier import Verifier
from workers.messages import GenerationRequest, SamplingParams, VerifyRequest, VerifyResponse, WorkerRole, token_ids
from workers.router.config import RouterConfig
from workers.router.router import Router

QUICK_TARGET, QUICK_DRAFTER = TargetTiming(0.5, 0.0), DrafterTiming(0.1, 0.0, 0.0)


def layout(*rates: float, targets: int = 1, **options: Any) -> ServiceLayout:
    drafter = DrafterLayout(AcceptanceProfile(rates), timing=QUICK_DRAFTER)
    return ServiceLayout((drafter,), targets, QUICK_TARGET, **options)


def config(**limits: Any) -> RouterConfig:
    chosen = router_config(**{"draft_length_policy": "fixed", "bench_drafters": False} | limits)
    assert chosen is not None
    return chosen


def answers_of(service: ServiceLayout, limits: RouterConfig, requests: Sequence[GenerationRequest]) -> list[Answer]:
    async def body() -> list[Answer]:
        async with serving(service, limits) as running:
            return await ask_all(running.router, requests, concurrency=6)

    return run_in_real_time(body)


@pytest.mark.parametrize(
    ("rates", "limits"),
    [
        ((0.0,), {"max_draft_tokens": 4}),
        ((0.6,), {"max_draft_tokens": 4, "prefill_chunk_tokens": 6, "max_batch_sequences": 3}),
        ((0.9, 0.3), {"max_draft_tokens": 7}),
        ((1.0,), {"max_draft_tokens": 3}),
    ],
)
def test_ids_are_those_of_plain_decoding(rates: tuple[float, ...], limits: dict[str, Any]) -> None:
    requests = [traffic(index, 40, traffic_class=index % 2) for index in range(12)]
    answers = answers_of(layout(*rates, targets=2, hop_ms=0.2), config(**limits), requests)
    for answer in answers:
        asked = answer.request
        assert answer.ids == synthetic_text(LANGUAGE, asked.prompt.tolist(), asked.sampling, 40)
    assert sum(answer.usage.accepted_tokens for answer in answers if answer.usage) > 0 or rates == (0.0,)


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_the_router_sees_the_acceptance_that_was_asked_for(rate: float) -> None:
    answers = answers_of(layout(rate), config(max_draft_tokens=1), [traffic(index, 100) for index in range(12)])
    usages = [answer.usage for answer in answers if answer.usage is not None]
    drafted, accepted = sum(usage.draft_tokens for usage in usages), sum(usage.accepted_tokens for usage in usages)
    assert drafted > 100
    assert abs(accepted / drafted - rate) <= 4 * np.sqrt(rate * (1 - rate) / drafted)


def test_sequences_that_make_room_for_others_go_on_with_the_same_ids() -> None:
    async def body() -> int:
        service = layout(0.7, size=replace(SIZE, total_blocks=12))
        async with serving(service, config(max_draft_tokens=4)) as running:
            await ask_all(running.router, [traffic(index, 60) for index in range(8)], concurrency=8)
            return (await running.totals()).preemptions

    assert run_in_real_time(body) > 0


def test_requests_that_are_stopped_are_compared_and_leave_nothing_behind() -> None:
    async def body() -> int:
        async with serving(layout(0.7), config(max_draft_tokens=4)) as running:
            async with Clients(running.router, 5, lambda index: traffic(index, 3_000)) as clients:
                while clients.tokens < 200:
                    await clients.wait(0.01)
            return clients.tokens

    assert run_in_real_time(body) >= 200


def test_a_target_whose_answers_are_changed_on_the_way_does_not_go_unnoticed() -> None:
    class Changed(SyntheticTarget):
        """Every token is another one."""

        def verify(self, request: VerifyRequest) -> VerifyResponse:
            response = super().verify(request)
            return replace(response, items=tuple(replace(i, token_ids=i.token_ids ^ 1) for i in response.items))

    async def body() -> None:
        router, link = Router(config(max_draft_tokens=0), no_detokenizer), ThreadLink(Changed(LANGUAGE, SIZE))
        await router.register(registration(WorkerRole.TARGET, "target", "changed"), link)
        try:
            with pytest.raises(WrongTextError):
                await ask_all(router, [replace(traffic(1, 8), timeout_s=0.5)], 1)
        finally:
            await router.close()
            link.close()

    run_in_real_time(body)


def test_wrong_and_missing_ids_are_told_from_right_ones() -> None:
    asked = traffic(1, 4)
    right = synthetic_text(LANGUAGE, asked.prompt.tolist(), asked.sampling, 4)
    check([Answer(asked, right), Answer(asked, right[:2])])
    with pytest.raises(WrongTextError, match="request-1 are not those"):
        check([Answer(asked, [*right[:3], right[3] ^ 1])])


def test_real_workers_give_the_same_ids_in_emulated_time(tmp_path: Path) -> None:
    model = save_byte_llama(tmp_path)
    engines = [load(tmp_path), load(save_drafters(model, tmp_path)["noisy"])]
    samplings = [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=3)]
    requests = [request(prompt, samplings[index % 2], 12) for index, prompt in enumerate(prompts(4))]
    limits = RouterConfig(max_draft_tokens=3)
    expected = [outcome.ids for outcome in run_all(engines[0], engines[1], requests, limits)[0]]

    async def body() -> tuple[list[list[int]], int]:
        target = EmulatedTarget(Verifier(engines[0]), QUICK_TARGET)
        drafter = EmulatedDrafter(ModelDrafter(engines[1]), QUICK_DRAFTER)
        router, links = Router(limits, no_detokenizer), [ThreadLink(target), ThreadLink(drafter)]
        await router.register(registration_of_engine(WorkerRole.TARGET, engines[0]), links[0])
        await router.register(registration_of_engine(WorkerRole.DRAFT, engines[1]), links[1])
        outcomes = await asyncio.gather(*(generate(router, each) for each in requests))
        await router.close()
        for link in links:
            await asyncio.to_thread(link.close)
        return [outcome.ids for outcome in outcomes], drafter.usage.steps

    ids, drafter_steps = run_in_real_time(body)
    assert ids == expected
    assert drafter_steps > 0


def test_traffic_of_equal_numbers_is_equal_and_of_others_differs() -> None:
    one, same, other = traffic(1, 8), traffic(1, 8), traffic(2, 8, traffic_class=1)
    assert one.prompt.tolist() == same.prompt.tolist() != other.prompt.tolist()
    assert (one.prompt[0], other.prompt[0]) == (0, 1)
    assert token_ids(one.prompt).max() < LANGUAGE.vocabulary_size
