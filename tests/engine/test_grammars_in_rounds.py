"""Structured output through whole rounds with real tiny models: no drafter and no draft length changes the ids."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import LlamaConfig

from tests.engine.tiny_models import TinyModel, save_model
from tests.engine.whole_rounds import InProcessLink, noisy_copy, prompts, registration, request, run_all, run_rounds
from tests.fakes import byte_tokenizer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.decoding.grammar import GrammarCompiler, GrammarMasks
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    FinishReason,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    Grammar,
    GrammarKind,
    LogitRules,
    SamplingParams,
    TokenIds,
    WorkerRole,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.router import Router

LoadEngine = Callable[..., Engine]
VOCABULARY, END = 257, 0
TOKENIZER = byte_tokenizer()
SAMPLINGS = [SamplingParams(temperature=0), SamplingParams(1.0, seed=5), SamplingParams(0.7, 40, 0.95, seed=2**62)]
CHUNKED = RouterConfig(prefill_chunk_tokens=16)
# Random models would fill their budgets with spaces.
DENSE = {"x-guidance": {"whitespace_flexible": False}}
ONE_INTEGER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -99, "maximum": 999}},
    "required": ["n"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "reddish", 7, None]},
        "in": ONE_INTEGER,
        "list": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "in", "list"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "one integer": ONE_INTEGER | DENSE,
    "enum": {"enum": ["yes", "yesterday", "no", 12, 123]},
    "nested": NESTED | DENSE,
    "array": DENSE | {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
}
REGEXES = {"regex": "(ab|c){2,5}x?", "choice": "yes|yesterday|no|não"}
GRAMMARS = {
    **{name: Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for name, schema in SCHEMAS.items()},
    **{name: Grammar(GrammarKind.REGEX, source) for name, source in REGEXES.items()},
}


def asking(grammar: Grammar, index: int, max_tokens: int = 48, **rules: Any) -> GenerationRequest:
    """One of several requests for `grammar`, with prompts and temperatures of their own."""
    sampling = replace(
        SAMPLINGS[index % 3], rules=LogitRules(grammar=grammar, end_token_ids=(END,), **rules), choice=index + 1
    )
    asked = request(prompts(index + 1)[index], sampling, max_tokens)
    return replace(asked, stop=replace(asked.stop, end_token_ids=frozenset({END})))


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.backend_tokenizer.decode(ids, skip_special_tokens=True))


def check(name: str, ids: list[int]) -> None:
    """The finished text must be what was asked for."""
    text = text_of(ids)
    if name in REGEXES:
        assert re.fullmatch(REGEXES[name], text), text
    else:
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny model whose ids are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    reference = save_model(config, folder)
    TOKENIZER.save_pretrained(folder)
    return TinyModel(folder, reference)


@pytest.fixture(scope="module")
def drafters(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters that are always right, often, hardly ever; and one that has no tokenizer to apply a grammar with."""
    folder = tmp_path_factory.mktemp("drafters")
    found = {
        "own weights": model.folder,
        "noisy": noisy_copy(model, folder / "noisy", 0.05),
        "random": noisy_copy(model, folder / "random", 3.0),
    }
    for path in found.values():
        TOKENIZER.save_pretrained(path)
    return found | {"blind": noisy_copy(model, folder / "blind", 0.0)}


@pytest.fixture
def load(load_engine: LoadEngine, model: TinyModel) -> LoadEngine:
    return lambda folder=model.folder: load_engine(folder)


@pytest.mark.parametrize("name", GRAMMARS)
def test_no_drafter_and_no_draft_length_changes_the_ids_and_what_is_finished_fits(
    load: LoadEngine, drafters: dict[str, Path], name: str
) -> None:
    target, requests = load(), [asking(GRAMMARS[name], index) for index in range(3)]
    plain, _ = run_all(target, None, requests, CHUNKED)
    finished = [outcome for outcome in plain if outcome.reason is FinishReason.STOP]
    assert finished or name == "any object"
    for outcome in finished:
        check(name, outcome.ids)
    for drafter, folder in drafters.items():
        engine = load(folder)
        for draft_tokens in (0, 1, 3, 5) if drafter == "noisy" else (5,):
            config = replace(CHUNKED, max_draft_tokens=draft_tokens)
            drafted, stats = run_all(target, engine, requests, config)
            assert [outcome.ids for outcome in drafted] == [outcome.ids for outcome in plain], (drafter, draft_tokens)
            assert [outcome.reason for outcome in drafted] == [outcome.reason for outcome in plain]
            assert all(entry.free_blocks == entry.total_blocks for entry in stats)


def test_a_drafter_that_mirrors_the_grammar_is_right_where_a_blind_one_is_not(
    load: LoadEngine, drafters: dict[str, Path]
) -> None:
    requests = [asking(GRAMMARS["nested"], index) for index in range(6)]
    accepted = {}
    for name in ("own weights", "blind"):
        outcomes, _ = run_all(load(), load(drafters[name]), requests, replace(CHUNKED, max_draft_tokens=3))
        usages = [outcome.usage for outcome in outcomes]
        accepted[name] = sum(usage.accepted_tokens for usage in usages) / sum(usage.draft_tokens for usage in usages)
    # Drafts behind an end are counted as drafted and never needed.
    assert accepted["own weights"] > 0.9 > 0.3 > accepted["blind"]


def test_grammars_share_a_batch_with_each_other_and_with_none(load: LoadEngine, drafters: dict[str, Path]) -> None:
    requests = [asking(grammar, index % 6) for index, grammar in enumerate(GRAMMARS.values())]
    requests += [request(prompts(3)[2], sampling) for sampling in SAMPLINGS]
    target = load()
    alone = [run_all(target, None, [asked], CHUNKED)[0][0].ids for asked in requests]
    together, _ = run_all(target, load(drafters["noisy"]), requests, replace(CHUNKED, max_draft_tokens=4))
    assert [outcome.ids for outcome in together] == alone


def test_other_options_apply_within_the_grammar(load: LoadEngine, drafters: dict[str, Path]) -> None:
    target, drafter = load(), load(drafters["noisy"])
    options: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "logit_bias": ((ord("7") - 32, -100.0),),
        "bad_words": tuple(tuple(TOKENIZER.encode(word)) for word in ("1", "re")),
    }
    grammar = Grammar(GrammarKind.REGEX, "[a-z0-9]{4,20}")
    requests = [asking(grammar, index, **options) for index in range(6)]
    plain, _ = run_all(target, None, requests, CHUNKED)
    for draft_tokens in (1, 4):
        drafted, _ = run_all(target, drafter, requests, replace(CHUNKED, max_draft_tokens=draft_tokens))
        assert [outcome.ids for outcome in drafted] == [outcome.ids for outcome in plain]
    for outcome in plain:
        assert re.fullmatch("[a-z02-689]{0,20}", text_of(outcome.ids))


# --- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_min_tokens_and_ignored_ends_are_filled_with_ends(
    load: LoadEngine, drafters: dict[str, Path], draft_tokens: int
) -> None:
    """A text that cannot go on is followed by end tokens only, which are not shown."""
    at_least = asking(Grammar(GrammarKind.REGEX, "ab"), 0, max_tokens=12, min_tokens=6)
    at_least = replace(at_least, stop=replace(at_least.stop, min_tokens=6))
    ignoring = asking(Grammar(GrammarKind.REGEX, "ab"), 1, max_tokens=12)
    ignoring = replace(ignoring, stop=replace(ignoring.stop, end_token_ids=frozenset()))
    config = replace(CHUNKED, max_draft_tokens=draft_tokens)
    outcomes, _ = run_all(load(), load(drafters["noisy"]), [at_least, ignoring], config)
    text = TOKENIZER.encode("ab")
    assert (outcomes[0].ids, outcomes[0].reason) == (text + [END] * 5, FinishReason.STOP)
    assert (outcomes[1].ids, outcomes[1].reason) == (text + [END] * 10, FinishReason.LENGTH)


# --- faults --------------------------------------------------------------------------------------------------


def last_events(target: Engine, requests: list[GenerationRequest]) -> list[GenerationEvent]:
    """The last event of each request, all run at once."""

    async def run() -> list[GenerationEvent]:
        router = Router(CHUNKED, lambda prompt: IncrementalDetokenizer(TOKENIZER.backend_tokenizer, prompt.tolist()))
        await router.register(registration(WorkerRole.TARGET, target), InProcessLink(Verifier(target)))

        async def last(asked: GenerationRequest) -> GenerationEvent:
            return [event async for event in router.generate(asked)][-1]

        found = await asyncio.gather(*map(last, requests))
        await router.close()
        return list(found)

    return run_rounds(run)


def test_a_grammar_of_which_bans_leave_nothing_ends_its_sequence_alone(load: LoadEngine) -> None:
    banned = asking(GRAMMARS["choice"], 0, logit_bias=tuple((token, -100.0) for token in TOKENIZER.encode("yn")))
    failed, other = last_events(load(), [banned, asking(GRAMMARS["choice"], 1)])
    assert isinstance(failed, GenerationFailed) and failed.code == "sequence_fault"
    assert "ban all of them" in failed.message and not isinstance(other, GenerationFailed)


def test_a_target_that_cannot_apply_a_grammar_says_so_and_draws_nothing(
    load: LoadEngine, drafters: dict[str, Path]
) -> None:
    (failed,) = last_events(load(drafters["blind"]), [asking(GRAMMARS["choice"], 0)])
    assert isinstance(failed, GenerationFailed) and failed.code == "sequence_fault"
    assert "no tokenizer.json" in failed.message


def never_roll_back(self: GrammarMasks, text: TokenIds) -> bool:
    """The fault of a parser that keeps rejected drafts."""
    unread = text[len(self._consumed) :]
    self._consumed = token_ids([*self._consumed, *unread])
    return bool(self._matcher.try_consume_tokens(unread.tolist()) == len(unread))


def test_a_parser_without_rollback_would_be_seen(
    load: LoadEngine, drafters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [asking(GRAMMARS["nested"], index) for index in range(6)]
    target, drafter = load(), load(drafters["blind"])
    plain, _ = run_all(target, None, requests, CHUNKED)
    monkeypatch.setattr(GrammarMasks, "_lead_to", never_roll_back)
    assert [outcome.ids for outcome in run_all(target, None, requests, CHUNKED)[0]] == [each.ids for each in plain]
    try:
        wrong = [outcome.ids for outcome in run_all(target, drafter, requests, CHUNKED)[0]]
    except AssertionError as error:  # a sequence that ended with a fault
        wrong = [str(error)]
    assert wrong != [each.ids for each in plain]


def test_a_grammar_is_compiled_once_for_all_its_sequences(load: LoadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    compile_one = GrammarCompiler._compile

    def counting(self: GrammarCompiler, grammar: Grammar) -> Any:
        compiled.append(grammar)
        return compile_one(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)
    run_all(load(), None, [asking(GRAMMARS["enum"], index) for index in range(4)], CHUNKED)
    assert compiled == [GRAMMARS["enum"]]
