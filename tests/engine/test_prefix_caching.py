"""Prefix caching in whole rounds: the same ids with and without, real hits, and nothing bad that spreads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.tiny_models import TinyModel
from tests.engine.whole_rounds import InProcessLink, noisy_copy, registration, request, run_all, run_rounds
from tests.fakes import byte_tokenizer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.errors import LinkClosedError
from workers.messages import (
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    LogitRules,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    TokenChunk,
    VerifyItem,
    VerifyRequest,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
    WorkerStats,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

LoadEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, seed=5, rules=LogitRules(repetition_penalty=1.3, frequency_penalty=0.4)),
]
PREFIX = [(7 * position) % 90 + 3 for position in range(70)]


def asked(count: int, begin: int = 0, max_tokens: int = 20) -> list[GenerationRequest]:
    """Requests that share 70, 69, ... tokens, and have 1 to 3 more."""
    return [
        request([*PREFIX[: 70 - index], *range(20 + begin + index, 21 + begin + 2 * index)], sampling, max_tokens)
        for index in range(count)
        for sampling in [SAMPLINGS[index % 3]]
    ]


def ids_of(outcomes: Sequence[Any]) -> list[list[int]]:
    return [outcome.ids for outcome in outcomes]


@pytest.mark.parametrize(
    ("family", "chunk"), [("llama", 16), ("llama", 512), ("mistral", 512), ("gpt2", 16), ("qwen2-sliding", 16)]
)
def test_ids_are_the_same_with_and_without_and_prompts_are_found(
    load_engine: LoadEngine, tiny_model: Callable[[str], TinyModel], tmp_path: Any, family: str, chunk: int
) -> None:
    folder = tiny_model(family).folder
    noisy = noisy_copy(tiny_model(family), tmp_path / "noisy", 0.05)
    config = RouterConfig(prefill_chunk_tokens=chunk)
    rounds = [asked(1), asked(3), asked(3, begin=10)]
    with_cache = load_engine(folder), load_engine(noisy)
    without = load_engine(folder, prefix_caching=False), load_engine(noisy, prefix_caching=False)
    for requests in rounds:
        found, stats = run_all(*with_cache, requests, config)
        plain, plain_stats = run_all(*without, requests, config)
        assert ids_of(found) == ids_of(plain)
        assert all(entry.free_blocks == entry.total_blocks for entry in stats)
        assert all(entry.cached_blocks == entry.prefix_cache_queries == 0 for entry in plain_stats)
    for entry in stats:  # of 443 tokens in 7 prompts the first 70 could not be found
        assert 6 * 64 - 4 * 16 <= entry.prefix_cache_hits <= 6 * 64 < entry.prefix_cache_queries
        assert entry.cached_blocks >= 4


def test_a_prefix_that_covers_more_than_a_chunk_is_not_read_again(load_engine: LoadEngine) -> None:
    engine, read = load_engine(), []
    forward = engine.forward
    engine.forward = lambda inputs: read.append(sum(len(item.token_ids) for item in inputs)) or forward(inputs)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        run_all(engine, None, [request(PREFIX, GREEDY, 1)], RouterConfig(prefill_chunk_tokens=16))
    assert read == [16, 16, 16, 16, 6, 6]


def test_a_drafter_that_finds_a_prompt_drafts_as_well_as_one_that_read_it(load_engine: LoadEngine) -> None:
    target, drafter = load_engine(prefix_caching=False), load_engine()
    for _ in range(3):
        outcomes, stats = run_all(target, drafter, [request(PREFIX, SAMPLINGS[1], 40)], RouterConfig())
        assert outcomes[0].usage.accepted_tokens == outcomes[0].usage.draft_tokens > 0
    assert stats[1].prefix_cache_hits == 2 * 64


@pytest.mark.parametrize("poisoned", [False, True])
def test_what_a_drafter_only_read_is_found_by_the_next_prompt_if_it_is_sound(
    load_engine: LoadEngine, poisoned: bool
) -> None:
    engine = load_engine()
    if poisoned:
        with torch.no_grad():
            engine._loaded.model.get_input_embeddings().weight[PREFIX[40]] = torch.nan  # type: ignore[operator]
    drafter = ModelDrafter(engine)
    read_only, drafted = (
        ProposeItem(number, 0, 0, token_ids(PREFIX), draft_tokens, GREEDY, len(PREFIX), prompt=token_ids(PREFIX))
        for number, draft_tokens in ((1, 0), (2, 3))
    )
    drafter.propose(ProposeRequest((read_only,)))
    drafter.release([1])
    # One message reads for one sequence and drafts for another; the rows of the one are not the other's.
    again, proposed = drafter.propose(ProposeRequest((replace(read_only, sequence_id=3), drafted))).items
    assert drafter.stats().prefix_cache_hits == (0 if poisoned else 2 * 64)
    assert len(again.proposal) == 0
    [alone] = ModelDrafter(load_engine()).propose(ProposeRequest((drafted,))).items
    assert poisoned or proposed.proposal.token_ids.tolist() == alone.proposal.token_ids.tolist()


def test_answers_are_found_by_prompts_that_continue_them(load_engine: LoadEngine) -> None:
    engine = load_engine()
    [first], _ = run_all(engine, load_engine(), [request(PREFIX[:10], SAMPLINGS[1], 40)], RouterConfig())
    continued = request([*PREFIX[:10], *first.ids, 5, 6], GREEDY, 10)
    found, stats = run_all(engine, None, [continued], RouterConfig())
    assert stats[0].prefix_cache_hits == 48  # of 49 tokens that were read; the last one drawn was not
    plain, _ = run_all(load_engine(prefix_caching=False), None, [continued], RouterConfig())
    assert ids_of(found) == ids_of(plain)


def test_requests_of_different_salts_find_nothing_of_each_other(load_engine: LoadEngine) -> None:
    engine, hits = load_engine(), []
    for salt in (None, "a", "b", "a", None):
        _, stats = run_all(engine, None, [replace(request(PREFIX, GREEDY, 2), cache_salt=salt)], RouterConfig())
        hits.append(stats[0].prefix_cache_hits)
    assert hits == [0, 0, 0, 64, 128]


def events_of(engine: Engine, requests: Sequence[GenerationRequest], link: type[InProcessLink] = InProcessLink) -> Any:
    """All events of `requests`, which are asked one after the other, and the target's stats."""

    async def run() -> tuple[list[list[GenerationEvent]], WorkerStats]:
        tokenizer = byte_tokenizer().backend_tokenizer
        router = Router(RouterConfig(), lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
        verifier = Verifier(engine)
        await router.register(registration(WorkerRole.TARGET, engine), link(verifier))
        events = [[event async for event in router.generate(each)] for each in requests]
        await router.close()
        return events, verifier.stats()

    return run_rounds(run)


def test_a_prompt_that_is_scored_is_read_whole_and_found_by_others(load_engine: LoadEngine) -> None:
    scored = replace(request(PREFIX, GREEDY, 2), logprobs=1, prompt_logprobs=True)
    plain = request([*PREFIX, 5], GREEDY, 2)
    events, stats = events_of(load_engine(), [plain, scored, scored, plain])
    for one in events[1:3]:
        chosen = torch.cat([torch.from_numpy(event.prompt_logprobs.chosen) for event in one if event.prompt_logprobs])
        assert chosen.shape == (len(PREFIX) - 1,)
        assert chosen.isfinite().all()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * 71, 64)
    _, stats = events_of(load_engine(), [scored, plain])
    assert stats.prefix_cache_hits == 64


def test_what_a_sequence_that_faulted_has_read_is_never_found(load_engine: LoadEngine) -> None:
    target, poisoned = load_engine(), 1
    with torch.no_grad():
        target._loaded.model.get_input_embeddings().weight[poisoned] = torch.nan  # type: ignore[operator]
    bad = request([*PREFIX[:40], poisoned, *PREFIX[41:]], GREEDY, 4)
    good = request(PREFIX, GREEDY, 4)
    events, stats = events_of(target, [bad, bad])
    assert all(isinstance(one[-1], GenerationFailed) for one in events)
    assert (stats.cached_blocks, stats.prefix_cache_hits) == (0, 0)
    events, stats = events_of(target, [good, bad, good, good])
    assert [isinstance(one[-1], GenerationFailed) for one in events] == [False, True, False, False]
    # The bad one began like the good one, so what they shared is read again, once.
    assert stats.prefix_cache_hits == 32 + 0 + 64


def test_blocks_that_went_bad_in_the_cache_cost_one_request_and_are_read_anew(load_engine: LoadEngine) -> None:
    target, good = load_engine(), request(PREFIX, GREEDY, 4)
    [expected], _ = events_of(target, [good])
    target._pool.keys[0].fill_(torch.nan)
    events, _ = events_of(target, [good, good])
    assert isinstance(events[0][-1], GenerationFailed)
    assert tokens_of(events[1]) == tokens_of(expected)


def tokens_of(events: Sequence[GenerationEvent]) -> list[int]:
    return [int(token) for event in events if isinstance(event, TokenChunk) for token in event.token_ids]


class ForgetfulLink(InProcessLink):
    """A worker that loses its sequences, though not what it has published, before every seventh step."""

    steps = 0

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See InProcessLink."""
        if isinstance(message, VerifyRequest):
            self.steps += 1
            if self.steps % 7 == 0:
                self._worker.release(None)
        return await super().call(message, deadline_s)


def test_sequences_that_were_lost_go_on_from_what_was_published_with_the_same_text(load_engine: LoadEngine) -> None:
    engine = load_engine()
    requests = asked(3, max_tokens=40)
    found, stats = run_all(engine, load_engine(), requests, RouterConfig(max_draft_tokens=2), ForgetfulLink)
    plain, _ = run_all(load_engine(prefix_caching=False), None, requests, RouterConfig())
    assert ids_of(found) == ids_of(plain)
    assert stats[0].prefix_cache_hits >= 3 * 64
    assert all(entry.free_blocks == entry.total_blocks for entry in stats)


class DyingLink(InProcessLink):
    """A worker whose link breaks at its fifth verification."""

    steps = 0

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See InProcessLink."""
        self.steps += isinstance(message, VerifyRequest)
        if self.steps >= 5:
            raise LinkClosedError("gone")
        return await super().call(message, deadline_s)


def test_a_sequence_that_moves_to_another_target_looks_up_its_answer_there_too(load_engine: LoadEngine) -> None:
    each = request(PREFIX, SAMPLINGS[1], 30)
    other = load_engine()
    run_all(other, None, [each], RouterConfig())

    async def run() -> tuple[list[GenerationEvent], WorkerStats]:
        tokenizer = byte_tokenizer().backend_tokenizer
        router = Router(RouterConfig(), lambda prompt: IncrementalDetokenizer(tokenizer, prompt.tolist()))
        dying, verifier = load_engine(), Verifier(other)
        await router.register(registration(WorkerRole.TARGET, dying, "dying"), DyingLink(Verifier(dying)))
        events = []
        async for event in router.generate(each):
            if not events:
                await router.register(registration(WorkerRole.TARGET, other), InProcessLink(verifier))
            events.append(event)
        await router.close()
        return events, verifier.stats()

    events, stats = run_rounds(run)
    plain, _ = run_all(load_engine(prefix_caching=False), None, [each], RouterConfig())
    assert tokens_of(events) == plain[0].ids
    assert stats.prefix_cache_hits == 64
    assert stats.prefix_cache_queries == len(PREFIX) + len(PREFIX) + 4


def test_a_step_is_as_long_as_what_it_reads_not_as_what_it_finds(load_engine: LoadEngine) -> None:
    """Step times are fitted to these numbers; prompts that were found would make reading look cheap."""
    verifier, prompt = Verifier(load_engine()), token_ids(PREFIX)

    def read(sequence_id: int, chunk: int) -> int:
        item = VerifyItem(
            sequence_id, 0, 0, prompt[:chunk], sample=chunk == 70, sampling=GREEDY, prompt_tokens=70, prompt=prompt
        )
        return verifier.verify(VerifyRequest((item,))).read_tokens

    assert [read(1, 70), read(2, 70), read(3, 32)] == [70, 6, 0]


def test_an_answer_that_starts_a_sequence_says_how_much_of_it_was_cached(load_engine: LoadEngine) -> None:
    verifier, prompt = Verifier(load_engine()), token_ids(PREFIX)

    def reused(sequence_id: int, chunk: int, salt: str | None = None) -> int:
        item = VerifyItem(
            sequence_id,
            0,
            0,
            prompt[:chunk],
            sample=chunk == 70,
            sampling=GREEDY,
            prompt_tokens=70,
            prompt=prompt,
            cache_salt=salt,
        )
        [answer] = verifier.verify(VerifyRequest((item,))).items
        return answer.reused_tokens

    assert [reused(1, 70), reused(2, 70), reused(3, 32), reused(4, 70, "other")] == [0, 64, 64, 0]
    [later] = verifier.verify(VerifyRequest((VerifyItem(2, 1, 70, token_ids([5])),))).items
    assert later.reused_tokens == 0
