"""Sampling options through whole rounds with real tiny models: no drafter and no draft length changes the ids."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.engine.tiny_models import VOCABULARY, TinyModel
from tests.engine.whole_rounds import (
    InProcessLink,
    Outcome,
    noisy_copy,
    prompts,
    registration,
    request,
    run_all,
    run_rounds,
)
from tests.fakes import byte_tokenizer
from workers.decoding import logit_rules
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.engine import Engine
from workers.engine.token_history import TokenHistory
from workers.engine.verifier import Verifier
from workers.messages import (
    FinishReason,
    GenerationFailed,
    GenerationRequest,
    LogitRules,
    ReleaseRequest,
    SamplingParams,
    TokenIds,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

LoadEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=2**63 - 1),
]
CHUNKED = RouterConfig(prefill_chunk_tokens=16)
ENDS = (5, 7, 11, 13, 20, 33, 34, 35, 60, 61, 62, 63, 70, 80, 90)
# Single tokens, and pairs and triples that sampling at temperature 1 meets now and then.
BAD_WORDS = ((8,), (9,), *((first, 95 - first) for first in range(96)), *((a, (a * 5) % 96, 40) for a in range(96)))
BIASES = tuple((token, -100.0 + 7 * token) for token in range(0, 27, 2))


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
    "logit_bias": Options(LogitRules(logit_bias=BIASES)),
    "repetition_penalty": Options(LogitRules(repetition_penalty=1.8)),
    "a reward for repetition": Options(LogitRules(repetition_penalty=0.8)),
    "presence_penalty": Options(LogitRules(presence_penalty=2.0)),
    "frequency_penalty": Options(LogitRules(frequency_penalty=1.5)),
    "min_p": Options(min_p=0.3),
    "bad_words": Options(LogitRules(bad_words=BAD_WORDS)),
    "all together": Options(LogitRules(5, ENDS[:4], BIASES, 1.3, -0.5, 1.1, BAD_WORDS), ENDS[:4], 0.05),
}


def plain_requests() -> list[GenerationRequest]:
    """Requests without options: prompts of 3 to 28 tokens, greedy and at two temperatures."""
    return [request(prompt, SAMPLINGS[index % 3]) for index, prompt in enumerate(prompts(6))]


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
    options, without, target = EACH[name], plain_requests(), load_engine()
    requests = [options.apply(asked) for asked in without]
    plain, _ = run_all(target, None, requests, CHUNKED)
    assert ids_of(plain) != ids_of(run_all(target, None, without, CHUNKED)[0])

    for drafter, folder in drafters.items():
        engine = load_engine(folder)
        for draft_tokens in (1, 2, 4) if drafter == "noisy" else (4,):
            config = replace(CHUNKED, max_draft_tokens=draft_tokens)
            drafted, stats = run_all(target, engine, requests, config)
            assert ids_of(drafted) == ids_of(plain), (drafter, draft_tokens)
            assert [outcome.reason for outcome in drafted] == [outcome.reason for outcome in plain]
            assert all(entry.free_blocks == entry.total_blocks for entry in stats)
            usages = [outcome.usage for outcome in drafted]
            if drafter == "own weights" and not options.end_token_ids:
                assert all(usage.accepted_tokens == usage.draft_tokens > 0 for usage in usages)


def test_requests_with_different_options_share_a_batch_and_do_not_touch_each_other(load_engine: LoadEngine) -> None:
    target, drafter = load_engine(), load_engine()
    options = [Options(), *EACH.values(), Options()]
    requests = [each.apply(plain_requests()[index % 6]) for index, each in enumerate(options)]
    together, _ = run_all(target, drafter, requests, CHUNKED)
    alone = [run_all(target, None, [asked], CHUNKED)[0][0] for asked in requests]
    assert ids_of(together) == ids_of(alone)


def test_greedy_ids_are_those_of_transformers_with_its_own_processors(
    load_engine: LoadEngine, tiny_llama: TinyModel
) -> None:
    prompt = prompts(4)[3]
    rules = LogitRules(
        6, ENDS[:4], tuple((token, bias) for token, bias in BIASES if bias > -100), 1.5, frequency_penalty=0.7
    )
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): bias for token, bias in rules.logit_bias}),
            RepetitionPenaltyLogitsProcessor(rules.repetition_penalty),
            MinNewTokensLengthLogitsProcessor(len(prompt), rules.min_tokens, list(rules.end_token_ids)),
        ]
    )
    expected = list(prompt)
    while len(expected) < len(prompt) + 24:
        scores = processors(torch.tensor([expected]), tiny_llama.logits(expected)[-1:].clone())
        # What transformers has no processor for: the prompt does not count.
        counts = np.bincount(expected[len(prompt) :], minlength=VOCABULARY)
        expected.append(int((scores - rules.frequency_penalty * torch.from_numpy(counts)).argmax()))

    outcomes, _ = run_all(load_engine(), load_engine(), [request(prompt, replace(GREEDY, rules=rules))], CHUNKED)

    assert outcomes[0].ids == expected[len(prompt) :]


# --- ends ----------------------------------------------------------------------------------------------------


def test_no_end_comes_before_min_tokens_and_the_first_after_it_counts(load_engine: LoadEngine) -> None:
    requests = [EACH["min_tokens"].apply(asked) for asked in plain_requests()]
    outcomes, _ = run_all(load_engine(), load_engine(), requests, CHUNKED)
    assert any(outcome.reason is FinishReason.STOP for outcome in outcomes)
    for outcome in outcomes:
        assert not set(outcome.ids[:9]) & set(ENDS)
        assert (outcome.ids[-1] in ENDS) is (outcome.reason is FinishReason.STOP)
        assert not set(outcome.ids[:-1]) & set(ENDS)


@pytest.mark.parametrize("draft_tokens", [1, 5])
def test_a_stop_token_inside_a_block_is_the_last_token(load_engine: LoadEngine, draft_tokens: int) -> None:
    target, drafter, asked = load_engine(), load_engine(), request(prompts(2)[1], SAMPLINGS[1])
    reference = run_all(target, None, [asked], CHUNKED)[0][0].ids
    stopping = Options(end_token_ids=(reference[2],)).apply(asked)
    outcomes, _ = run_all(target, drafter, [stopping], replace(CHUNKED, max_draft_tokens=draft_tokens))
    assert outcomes[0].ids == reference[: reference.index(reference[2]) + 1]
    assert outcomes[0].reason is FinishReason.STOP
    assert outcomes[0].usage.committed_tokens == len(outcomes[0].ids)


# --- bans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_banned_tokens_never_appear(load_engine: LoadEngine, sampling: SamplingParams) -> None:
    target, drafter, prompt = load_engine(), load_engine(), prompts(2)[1]
    reference = run_all(target, None, [request(prompt, sampling)], CHUNKED)[0][0].ids
    banned = sorted(set(reference[:10]))
    for rules in (
        LogitRules(logit_bias=tuple((token, -100.0) for token in banned)),
        LogitRules(bad_words=tuple((token,) for token in banned)),
    ):
        outcomes, _ = run_all(target, drafter, [request(prompt, replace(sampling, rules=rules))], CHUNKED)
        assert not set(outcomes[0].ids) & set(banned)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_options_that_ban_everything_end_their_sequence_alone_and_with_the_reason(
    load_engine: LoadEngine, sampling: SamplingParams
) -> None:
    everything = LogitRules(logit_bias=tuple((token, -100.0) for token in range(VOCABULARY)))
    # After one token nothing is left: the fault comes inside the chain.
    later = LogitRules(bad_words=tuple((first, second) for first in range(VOCABULARY) for second in range(VOCABULARY)))
    asked = [
        request([3, 4], replace(sampling, rules=everything), 8),
        request([3, 4], replace(sampling, rules=later), 8),
        request([3, 4], sampling, 8),
    ]
    target, drafter = load_engine(), load_engine()
    expected = run_all(target, None, asked[2:], CHUNKED)[0][0].ids

    async def run() -> list[list[object]]:
        tokenizer = byte_tokenizer().backend_tokenizer
        router = Router(CHUNKED, lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
        await router.register(registration(WorkerRole.TARGET, target), InProcessLink(Verifier(target)))
        await router.register(registration(WorkerRole.DRAFT, drafter), InProcessLink(ModelDrafter(drafter)))

        async def events(each: GenerationRequest) -> list[object]:
            return [event async for event in router.generate(each)]

        collected = await asyncio.gather(*map(events, asked))
        await asyncio.sleep(0.05)
        await router.close()
        return list(collected)

    first, second, neighbour = run_rounds(run)
    for events in (first, second):
        assert isinstance(events[-1], GenerationFailed)
        assert events[-1].code == "sequence_fault" and "ban all of them" in events[-1].message
    assert len(first) == 1
    assert [int(token) for event in neighbour for token in event.token_ids] == expected  # type: ignore[attr-defined]
    assert target.free_blocks == target.total_blocks and drafter.free_blocks == drafter.total_blocks


# --- histories -----------------------------------------------------------------------------------------------


def test_workers_that_lose_their_sequences_find_the_same_history_again(load_engine: LoadEngine) -> None:
    """What is read anew counts as prompt or output as before, although it comes in the same messages."""
    requests = [EACH["all together"].apply(asked) for asked in plain_requests()]
    target, drafter = load_engine(), load_engine()
    expected = ids_of(run_all(target, None, requests, CHUNKED)[0])

    class Forgetful(InProcessLink):
        calls = 0

        async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
            self.calls += 1
            if self.calls % 7 == 0:
                await super().call(ReleaseRequest(None), deadline_s)
            return await super().call(message, deadline_s)

    outcomes, _ = run_all(target, drafter, requests, CHUNKED, Forgetful)
    assert ids_of(outcomes) == expected


def same_history_for_the_whole_chain(slots: npt.NDArray[np.int64], rows: int, width: int) -> npt.NDArray[np.float32]:
    """The fault of counting committed tokens only."""
    committed = np.bincount(slots[: len(slots) - rows + 1], minlength=width).astype(np.float32)
    return np.tile(committed, (rows, 1))


def never_forget(self: TokenHistory, first_position: int, token_ids: TokenIds) -> None:
    """The fault of a history that keeps rejected drafts."""
    write(self, max(first_position, len(self.tokens)), token_ids)


write = TokenHistory.write


@pytest.mark.parametrize("fault", ["committed tokens only", "no rollback"])
def test_a_wrong_history_in_the_workers_would_be_seen(
    load_engine: LoadEngine, drafters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    requests = [
        request(prompt, SamplingParams(temperature, seed=3, rules=LogitRules(frequency_penalty=2.0)), 40)
        for temperature in (0.0, 0.3)
        for prompt in prompts(6)
    ]
    target, drafter = load_engine(), load_engine(drafters["noisy"])
    plain = ids_of(run_all(target, None, requests, CHUNKED)[0])
    if fault == "no rollback":
        monkeypatch.setattr(TokenHistory, "write", never_forget)
    else:
        monkeypatch.setattr(logit_rules, "_growing_counts", same_history_for_the_whole_chain)
    assert ids_of(run_all(target, None, requests, CHUNKED)[0]) == plain
    assert ids_of(run_all(target, drafter, requests, CHUNKED)[0]) != plain
