"""Sampling options through whole rounds with real tiny models: no drafter and no draft length changes the ids."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.engine.tiny_models import TinyModel
from tests.engine.whole_rounds import Outcome, noisy_copy, prompts, request, run_all
from workers.engine.engine import Engine
from workers.messages import FinishReason, GenerationRequest, LogitRules, SamplingParams
from workers.router.config import RouterConfig

LoadEngine = Callable[..., Engine]
CHUNKED = RouterConfig(prefill_chunk_tokens=16)
# Single tokens, and pairs and triples that sampling at temperature 1 meets now and then.
BAD_WORDS = ((8,), (9,), *((first, 95 - first) for first in range(96)), *((a, (a * 5) % 96, 40) for a in range(96)))
ENDS = (5, 7, 11, 13, 20, 33, 34, 35, 60, 61, 62, 63, 70, 80, 90)


@dataclass(frozen=True)
class Options:
    """What a request asks beside its temperature."""

    rules: LogitRules | None = None
    end_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0

    def apply(self, asked: GenerationRequest) -> GenerationRequest:
        """The request with these options."""
        minimum = self.rules.min_tokens if self.rules else 0
        stop = replace(asked.stop, end_token_ids=frozenset(self.end_token_ids), min_tokens=minimum)
        return replace(asked, sampling=replace(asked.sampling, rules=self.rules, min_p=self.min_p), stop=stop)


EACH = {
    "stop tokens": Options(end_token_ids=ENDS),
    "min_tokens": Options(LogitRules(min_tokens=9, end_token_ids=ENDS), ENDS),
    "logit_bias": Options(LogitRules(logit_bias=tuple((token, -100.0 + 7 * token) for token in range(0, 27, 2)))),
    "repetition_penalty": Options(LogitRules(repetition_penalty=1.8)),
    "a reward for repetition": Options(LogitRules(repetition_penalty=0.8)),
    "presence_penalty": Options(LogitRules(presence_penalty=2.0)),
    "frequency_penalty": Options(LogitRules(frequency_penalty=1.5)),
    "min_p": Options(min_p=0.3),
    "bad_words": Options(LogitRules(bad_words=BAD_WORDS)),
}


def plain_requests() -> list[GenerationRequest]:
    """Requests without options: prompts of 3 to 28 tokens, greedy and at two temperatures."""
    samplings = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=2**63 - 1),
    ]
    return [request(prompt, samplings[index % 3]) for index, prompt in enumerate(prompts(6))]


def ids_of(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.ids for outcome in outcomes]


@pytest.fixture(scope="module")
def drafters(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of drafters that are always right, often right and hardly ever right."""
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "own weights": tiny_llama.folder,
        "noisy": noisy_copy(tiny_llama, folder / "noisy", 0.05),
        "random": noisy_copy(tiny_llama, folder / "random", 3.0),
    }


@pytest.mark.parametrize("name", EACH)
def test_no_drafter_and_no_draft_length_changes_the_ids(
    load_engine: LoadEngine, drafters: dict[str, Path], name: str
) -> None:
    without = plain_requests()
    requests = [EACH[name].apply(asked) for asked in without]
    plain, _ = run_all(load_engine(), None, requests, CHUNKED)
    assert ids_of(plain) != ids_of(run_all(load_engine(), None, without, CHUNKED)[0])

    for drafter, folder in drafters.items():
        for draft_tokens in range(1, 5):
            config = replace(CHUNKED, max_draft_tokens=draft_tokens)
            drafted, stats = run_all(load_engine(), load_engine(folder), requests, config)
            assert ids_of(drafted) == ids_of(plain), (drafter, draft_tokens)
            assert [outcome.reason for outcome in drafted] == [outcome.reason for outcome in plain]
            assert all(entry.free_blocks == entry.total_blocks for entry in stats)
            usages = [outcome.usage for outcome in drafted]
            if drafter == "own weights" and not EACH[name].end_token_ids:
                assert all(usage.accepted_tokens == usage.draft_tokens > 0 for usage in usages)


def test_no_end_comes_before_min_tokens_and_the_first_after_it_counts(load_engine: LoadEngine) -> None:
    requests = [EACH["min_tokens"].apply(asked) for asked in plain_requests()]
    outcomes, _ = run_all(load_engine(), load_engine(), requests, CHUNKED)
    assert any(outcome.reason is FinishReason.STOP for outcome in outcomes)
    for outcome in outcomes:
        assert not set(outcome.ids[:9]) & set(ENDS)
        assert (outcome.ids[-1] in ENDS) is (outcome.reason is FinishReason.STOP)
        assert not set(outcome.ids[:-1]) & set(ENDS)
