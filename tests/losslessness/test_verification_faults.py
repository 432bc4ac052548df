"""Faults that users of comparable systems met in verification and rollback (A of the public faults)."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.testclient import TestClient

from deployments.text import TextCodec
from tests.in_process import DRAFTER_NOISE, InProcessService, application
from tests.losslessness.asking import OFF, ask, drafted_by
from workers.messages import GenerationEvent, GenerationRequest


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("verification", ["coupled", "ratio"])
def test_b01_greedy_text_is_the_targets_with_a_drafter_that_is_never_right(
    client: TestClient, k: int, verification: str
) -> None:
    drafted = ask(client, **drafted_by("random", k, verification))
    assert drafted.ids == ask(client, **OFF).ids
    assert drafted.usage["speculation"]["draft_tokens"] > 0


@pytest.mark.parametrize("verification", ["coupled", "ratio"])
def test_b03_a_single_possible_token_is_drawn_without_trouble(client: TestClient, verification: str) -> None:
    options = {"temperature": 1.0, "top_k": 1, "seed": 3}
    assert ask(client, **options, **drafted_by("own", 4, verification)).ids == ask(client, **OFF).ids


@pytest.mark.parametrize("temperature", [1e-5, 1e-7, 1e-12])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("verification", ["coupled", "ratio"])
def test_b05_a_temperature_near_zero_is_greedy(
    client: TestClient, temperature: float, k: int, verification: str
) -> None:
    options = {"temperature": temperature, "seed": 3, "max_tokens": 40}
    drafted = ask(client, **options, **drafted_by("random", k, verification))
    assert drafted.ids == ask(client, max_tokens=40, **OFF).ids


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_b06_a_drafter_with_the_targets_weights_is_always_right(client: TestClient, k: int, temperature: float) -> None:
    usage = ask(client, max_tokens=64, temperature=temperature, seed=3, ignore_eos=True, **drafted_by("own", k)).usage
    speculation = usage["speculation"]
    assert speculation["accepted_tokens"] == speculation["draft_tokens"] > 0


class GatheringService(InProcessService):
    """Begins no generation before `together` requests have come, so that none is over before the last one begins."""

    together = 1
    _come = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        self._come += 1
        while self._come < self.together:
            await asyncio.sleep(0.001)
        async for event in super().generate(request):
            yield event

    def gather(self, requests: int) -> None:
        """The next `requests` requests begin together."""
        self.together, self._come = requests, 0


def test_b09_requests_that_do_not_fit_into_the_pool_together_all_get_their_own_text(
    make_service: Callable[..., InProcessService], codec: TextCodec
) -> None:
    # One context of 160 tokens and a little more: three requests of 100 tokens cannot end together.
    service = make_service("own", "noisy", kv_cache_gib=0.000085, kind=GatheringService)
    assert isinstance(service, GatheringService)
    needed = -(-(len("The sky") + 100) // service.target.block_tokens)
    assert needed <= service.target.total_blocks < 3 * needed
    with TestClient(application(service, codec)) as client:
        bodies = [{"max_tokens": 100, "seed": seed, "temperature": 1.0, "ignore_eos": True} for seed in range(3)]
        alone = [ask(client, **body, **OFF).ids for body in bodies]
        service.gather(len(bodies))
        together = _at_once(client, [{**body, **drafted_by("noisy")} for body in bodies])
    assert together == alone
    assert service.target.free_blocks == service.target.total_blocks


def test_b09_sequences_that_are_preempted_again_and_again_keep_their_text(
    make_service: Callable[..., InProcessService], codec: TextCodec
) -> None:
    # By their budgets only one of the five would fit; by what they need at first all of them do.
    service = make_service("own", "noisy", kv_cache_gib=0.000085, kind=GatheringService)
    assert isinstance(service, GatheringService)
    with TestClient(application(service, codec)) as client:
        bodies = [{"max_tokens": 140, "seed": seed, "temperature": 1.0, "ignore_eos": True} for seed in range(5)]
        alone = [ask(client, **body, **OFF).ids for body in bodies]
        drafters = ["noisy", "own", "noisy", "own", "noisy"]
        drafted = [body | drafted_by(name) for body, name in zip(bodies, drafters, strict=True)]
        service.gather(len(bodies))
        together = _at_once(client, [*drafted[:4], bodies[4] | OFF])
        preemptions = client.get("/status").json()["totals"]["preemptions"]
    assert together == alone
    assert preemptions > 0
    engines = [service.target, *service.drafters.values()]
    assert [engine.free_blocks for engine in engines] == [engine.total_blocks for engine in engines]


def _at_once(client: TestClient, bodies: list[dict[str, object]]) -> list[list[int]]:
    async def ask_all() -> list[list[int]]:
        asking = [asyncio.to_thread(lambda body=body: ask(client, **body).ids) for body in bodies]  # type: ignore[misc]
        return list(await asyncio.gather(*asking))

    return asyncio.run(ask_all())


def test_b24_seeds_penalties_and_temperatures_in_one_batch_do_not_touch_each_other(client: TestClient) -> None:
    greedy = {"prompt": "1 2 3 4"}
    others = [
        {"temperature": 1.2, "seed": 5},
        {"temperature": 1.2},
        {"temperature": 1.2, "frequency_penalty": 1.0, "seed": 6},
        {"temperature": 1.2, "top_p": 0.8, "seed": 7, **drafted_by("random")},
        {"temperature": 1.2, "seed": 8, **drafted_by("noisy", 3, "ratio")},
        {"temperature": 1.2, "presence_penalty": 1.5, **drafted_by("own", 8)},
        {"temperature": 1.2, "logit_bias": {"50": 3}, "seed": 9},
    ]
    alone = ask(client, **greedy, **OFF).ids
    seeded = [ask(client, **others[0], **OFF).ids, ask(client, **others[2], **OFF).ids]
    together = _at_once(client, [{**greedy, **drafted_by("noisy")}, *others])
    assert together[0] == alone
    assert [together[1], together[3]] == seeded


def test_drafters_are_what_their_names_say(client: TestClient) -> None:
    """Otherwise the tests of this folder would not see accepted, corrected and bonus tokens alike."""
    rates = {}
    for drafter in DRAFTER_NOISE:
        usages = [
            ask(client, temperature=1.0, seed=seed, ignore_eos=True, **drafted_by(drafter)).usage["speculation"]
            for seed in range(3)
        ]
        drafted = sum(usage["draft_tokens"] for usage in usages)
        rates[drafter] = sum(usage["accepted_tokens"] for usage in usages) / drafted
    assert rates["own"] == 1
    assert 0.2 < rates["noisy"] < 0.98
    assert rates["random"] < 0.2
