"""Verification by ratio through whole rounds with real tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_rules_in_rounds import CHUNKED, EACH, GREEDY, Options, drafters, ids_of
from tests.engine.whole_rounds import prompts, request, run_all
from workers.engine.engine import Engine
from workers.messages import GenerationRequest, SamplingParams, SpeculationOptions, Verification

__all__ = ["drafters"]
LoadEngine = Callable[..., Engine]
BY_RATIO = SpeculationOptions(verification=Verification.RATIO)
RATIO_BY_DEFAULT = replace(CHUNKED, verification=Verification.RATIO)


def by_ratio(asked: GenerationRequest) -> GenerationRequest:
    return replace(asked, speculation=BY_RATIO)


@pytest.mark.parametrize("name", ["no options", *EACH])
def test_greedy_ids_do_not_depend_on_drafts_and_own_weights_are_always_accepted(
    load_engine: LoadEngine, drafters: dict[str, Path], name: str
) -> None:
    options, target = EACH.get(name, Options()), load_engine()
    greedy = [options.apply(request(prompt, GREEDY)) for prompt in prompts(4)]
    sampled = [options.apply(request(prompt, SamplingParams(1.0, seed=5))) for prompt in prompts(4)]
    plain, _ = run_all(target, None, greedy, CHUNKED)
    for drafter, folder in drafters.items():
        engine = load_engine(folder)
        for draft_tokens in (1, 4) if drafter == "noisy" else (4,):
            config = replace(RATIO_BY_DEFAULT, max_draft_tokens=draft_tokens)
            drafted, stats = run_all(target, engine, greedy + sampled, config)
            assert ids_of(drafted[:4]) == ids_of(plain), (drafter, draft_tokens)
            assert all(entry.free_blocks == entry.total_blocks for entry in stats)
            usages = [outcome.usage for outcome in drafted]
            if drafter == "own weights" and not options.end_token_ids:
                assert all(usage.accepted_tokens == usage.draft_tokens > 0 for usage in usages[:4])


def test_the_modes_share_batches_and_the_coupled_ids_stay_what_they_are(
    load_engine: LoadEngine, drafters: dict[str, Path]
) -> None:
    target, drafter = load_engine(), load_engine(drafters["noisy"])
    coupled = [request(prompt, SamplingParams(0.9, seed=index)) for index, prompt in enumerate(prompts(6))]
    mixed = [asked if index % 2 else by_ratio(asked) for index, asked in enumerate(coupled)]
    plain, _ = run_all(target, None, coupled, CHUNKED)
    outcomes, _ = run_all(target, drafter, mixed, CHUNKED)
    assert ids_of(outcomes)[1::2] == ids_of(plain)[1::2]
    assert ids_of(outcomes)[0::2] != ids_of(plain)[0::2]
    assert sum(outcome.usage.accepted_tokens for outcome in outcomes[0::2]) > 0


def test_a_request_may_choose_otherwise_than_the_deployment(load_engine: LoadEngine, drafters: dict[str, Path]) -> None:
    target, drafter = load_engine(), load_engine(drafters["noisy"])
    asked = [request(prompt, SamplingParams(1.0, seed=3), 40) for prompt in prompts(3)]
    chosen = [replace(each, speculation=SpeculationOptions(verification=Verification.COUPLED)) for each in asked]
    plain, _ = run_all(target, None, asked, CHUNKED)
    assert ids_of(run_all(target, drafter, asked, RATIO_BY_DEFAULT)[0]) != ids_of(plain)
    assert ids_of(run_all(target, drafter, chosen, RATIO_BY_DEFAULT)[0]) == ids_of(plain)
