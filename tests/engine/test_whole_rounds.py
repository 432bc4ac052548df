"""Router, drafter and verifier with real tiny models in one process: everything but Ray and HTTP."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_models import CONTEXT, FAMILIES, TinyModel
from tests.engine.whole_rounds import InProcessLink, noisy_copy, prompts, registration, request, run_all, run_rounds
from tests.fakes import byte_tokenizer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import FinishReason, GenerationFailed, SamplingParams, SpeculationOptions, WorkerRole
from workers.router.config import RouterConfig
from workers.router.router import Router

LoadEngine = Callable[..., Engine]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=2**63 - 1),
]


def test_ids_do_not_depend_on_the_drafter_or_its_draft_length(
    load_engine: LoadEngine, tiny_llama: TinyModel, tmp_path: Path
) -> None:
    requests = [request(prompt, SAMPLINGS[index % 3]) for index, prompt in enumerate(prompts(6))]
    plain = [outcome.ids for outcome in run_all(load_engine(), None, requests, RouterConfig())[0]]
    accepted = []
    for noise in (0.0, 0.05, 3.0):
        folder = noisy_copy(tiny_llama, tmp_path / str(noise), noise)
        for draft_tokens in (1, 4):
            config = RouterConfig(max_draft_tokens=draft_tokens, prefill_chunk_tokens=16)
            outcomes, _ = run_all(load_engine(), load_engine(folder), requests, config)
            assert [outcome.ids for outcome in outcomes] == plain
            accepted.append(sum(outcome.usage.accepted_tokens for outcome in outcomes))
    assert accepted[1] > accepted[3] > accepted[5]


@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_with_the_targets_weights_is_always_right(
    load_engine: LoadEngine, sampling: SamplingParams, draft_tokens: int
) -> None:
    config = RouterConfig(max_draft_tokens=draft_tokens)
    outcomes, _ = run_all(load_engine(), load_engine(), [request(prompts(3)[2], sampling, 64)], config)
    usage = outcomes[0].usage
    assert usage.accepted_tokens == usage.draft_tokens > 0
    assert usage.committed_tokens == usage.accepted_tokens + usage.verifications == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_the_same_with_and_without_drafts(
    load_engine: LoadEngine, tiny_model: Callable[[str], TinyModel], family: str
) -> None:
    folder = tiny_model(family).folder
    requests = [request(prompt, SAMPLINGS[1], 12) for prompt in prompts(3)]
    drafted, _ = run_all(load_engine(folder), load_engine(folder), requests, RouterConfig())
    plain, _ = run_all(load_engine(folder), None, requests, RouterConfig())
    assert [outcome.ids for outcome in drafted] == [outcome.ids for outcome in plain]


def test_drafts_never_pass_the_last_position_of_the_context(load_engine: LoadEngine) -> None:
    prompt = [(5 * position) % 90 + 3 for position in range(CONTEXT - 4)]
    config = RouterConfig(max_draft_tokens=8, prefill_chunk_tokens=32)
    outcomes, stats = run_all(load_engine(), load_engine(), [request(prompt, SAMPLINGS[0], 4)], config)
    assert len(outcomes[0].ids) == 4
    assert outcomes[0].reason is FinishReason.LENGTH
    assert all(entry.free_blocks == entry.total_blocks for entry in stats)


def test_a_drafter_with_a_shorter_context_stops_drafting_where_it_ends(load_engine: LoadEngine) -> None:
    requests = [request(prompts(2)[1], SAMPLINGS[1], 60)]
    outcomes, _ = run_all(load_engine(), load_engine(max_context_tokens=32), requests, RouterConfig())
    plain, _ = run_all(load_engine(), None, requests, RouterConfig())
    assert outcomes[0].ids == plain[0].ids
    assert 0 < outcomes[0].usage.accepted_tokens < 32


def test_exactly_the_budget_is_delivered_and_all_blocks_come_back(load_engine: LoadEngine) -> None:
    requests = [request(prompts(1)[0], SAMPLINGS[1], budget) for budget in range(1, 13)]
    outcomes, stats = run_all(load_engine(), load_engine(), requests, RouterConfig(max_draft_tokens=5))
    assert [len(outcome.ids) for outcome in outcomes] == list(range(1, 13))
    assert [outcome.usage.committed_tokens for outcome in outcomes] == list(range(1, 13))
    assert all(entry.free_blocks == entry.total_blocks for entry in stats)


def test_a_request_may_switch_speculation_off_or_shorten_it(load_engine: LoadEngine) -> None:
    base = request(prompts(2)[1], SAMPLINGS[1])
    variants = [
        base,
        replace(base, speculation=SpeculationOptions(enabled=False)),
        replace(base, speculation=SpeculationOptions(max_draft_tokens=1)),
        replace(base, speculation=SpeculationOptions(drafter="another")),
    ]
    outcomes, _ = run_all(load_engine(), load_engine(), variants, RouterConfig())
    assert len({tuple(outcome.ids) for outcome in outcomes}) == 1
    assert [len(outcome.usage.accepted_per_position) for outcome in outcomes] == [4, 0, 1, 0]
    assert outcomes[3].usage.fallback_rounds > 0


def test_logits_that_are_not_finite_end_their_sequence_alone_and_leave_nothing_in_the_blocks_it_had(
    load_engine: LoadEngine,
) -> None:
    target, poisoned = load_engine(), 5
    with torch.no_grad():
        target._loaded.model.get_input_embeddings().weight[poisoned] = torch.nan  # type: ignore[operator]

    async def run() -> list[object]:
        tokenizer = byte_tokenizer().backend_tokenizer
        router = Router(RouterConfig(), lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
        await router.register(registration(WorkerRole.TARGET, target), InProcessLink(Verifier(target)))

        async def last_event(prompt: list[int]) -> object:
            return [event async for event in router.generate(request(prompt, SAMPLINGS[0], 4))][-1]

        events = await asyncio.gather(last_event([3] * 20 + [poisoned] * 8), last_event([3, 4]))
        events += [await last_event([3, 4]) for _ in range(3)]
        await router.close()
        return list(events)

    bad, *good = run_rounds(run)
    assert isinstance(bad, GenerationFailed)
    assert "not finite" in bad.message
    assert not any(isinstance(event, GenerationFailed) for event in good)
