"""Masks of grammars: functions of the output alone, whatever was asked before, for every kind of tokenizer."""

import json
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tests.fakes import byte_tokenizer
from workers.decoding.grammar import GrammarCompiler, GrammarMasks
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_tokens, warped_scores
from workers.errors import GrammarError
from workers.messages import Grammar, GrammarKind, LogitRules, SamplingParams, token_ids

TEXTS = ['{"name": "hello world", "count": [1, 23, 456]}', "ünïcödé 中文 text, and more"] * 3
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", 7, None]}, "maxItems": 3},
        "in": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
    "required": ["name", "tags", "in"],
    "additionalProperties": False,
}


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


GRAMMARS = {
    "any object": schema({"type": "object"}),
    "nested": schema(NESTED),
    "number": schema({"type": "number"}),
    "regex": regex("(ab|a|中)*c?"),
    "choice": regex("yes|yesterday|no"),
}


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """Built as those of Llama 2 and Mistral: spaces written as a letter, unknown characters as bytes."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = BpeTrainer(vocab_size=150, special_tokens=["<s>", "<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    return Tokenizer.from_str(json.dumps(content))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_tokenizer().backend_tokenizer,
    "byte-level": byte_level_bpe,
    "sentencepiece": sentencepiece_bpe,
}
_built: dict[str, tuple[Tokenizer, GrammarCompiler]] = {}


def built(kind: str) -> tuple[Tokenizer, GrammarCompiler]:
    if kind not in _built:
        tokenizer = TOKENIZERS[kind]()
        _built[kind] = tokenizer, GrammarCompiler(tokenizer.to_str)
    return _built[kind]


def masks_of(grammar: Grammar, kind: str = "bytes", ends: tuple[int, ...] = (0,)) -> GrammarMasks:
    tokenizer, compiler = built(kind)
    return GrammarMasks(compiler.compile(grammar), ends, tokenizer.get_vocab_size())


def allowed(masks: GrammarMasks, output: list[int], hold_back_ends: bool = False) -> list[int]:
    bits = masks.allowed_after(token_ids(output), hold_back_ends)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def ids(text: str, kind: str = "bytes") -> list[int]:
    return list(built(kind)[0].encode(text, add_special_tokens=False).ids)


# --- the state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=15)
@given(data=st.data())
def test_after_any_drafts_accepted_and_rejected_the_masks_are_those_of_a_fresh_parser(
    kind: str, name: str, data: st.DataObject
) -> None:
    """Rounds of good and bad drafts: some are kept, the rest forgotten, and every position is asked about."""
    masks, size = masks_of(GRAMMARS[name], kind), built(kind)[0].get_vocab_size()
    committed: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        drafts: list[int] = []
        for _ in range(data.draw(st.integers(0, 4))):
            good = allowed(masks_of(GRAMMARS[name], kind), committed + drafts)
            bad = st.integers(0, size - 1)
            drafts.append(data.draw(st.sampled_from(good) | bad if good else bad))
        for count in range(len(drafts) + 1):
            output = committed + drafts[:count]
            assert allowed(masks, output) == allowed(masks_of(GRAMMARS[name], kind), output)
        committed += drafts[: data.draw(st.integers(0, len(drafts)))]


def test_branches_of_a_tree_may_be_asked_about_in_any_order() -> None:
    masks, root = masks_of(GRAMMARS["choice"]), ids("y")
    paths = [ids("es"), ids("esterday"), ids("no"), ids("est"), [], ids("es"), ids("e")]
    found = [allowed(masks, root + path) for path in paths]
    assert found == [allowed(masks_of(GRAMMARS["choice"]), root + path) for path in paths]
    assert found[0] == sorted([0, *ids("t")]) and found[1] == [0] and found[2] == []


# --- ends ----------------------------------------------------------------------------------------------------


def test_a_text_ends_where_it_may_and_must_where_it_cannot_go_on() -> None:
    masks = masks_of(regex("a+b?"), ends=(0, 5))
    assert allowed(masks, []) == ids("a")
    assert allowed(masks, ids("a")) == sorted([0, 5, *ids("ab")])
    assert allowed(masks, ids("aab")) == [0, 5]


def test_ends_held_back_yield_to_a_text_that_cannot_go_on() -> None:
    masks = masks_of(regex("a+b?"))
    assert allowed(masks, ids("a"), hold_back_ends=True) == ids("ab")
    assert allowed(masks, ids("ab"), hold_back_ends=True) == [0]


def test_behind_an_end_there_are_only_ends() -> None:
    masks = masks_of(regex("a+"), ends=(0, 5))
    for hold_back in (False, True):
        assert allowed(masks, [*ids("a"), 0], hold_back) == [0, 5]
        assert allowed(masks, [*ids("aa"), 5, 0, *ids("a")], hold_back) == [0, 5]
    assert allowed(masks, [0]) == []
    assert allowed(masks, ids("a")) == sorted([0, 5, *ids("a")])


def test_an_end_id_that_is_also_text_only_ends() -> None:
    """Even where the grammar would take it as text: a text that it cut short would break the grammar."""
    letter = ids("b")[0]
    masks = masks_of(regex("ab?c"), ends=(0, letter))
    assert allowed(masks, ids("a")) == ids("c")
    assert allowed(masks, ids("ac")) == [0, letter]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_never_text(kind: str) -> None:
    tokenizer, _ = built(kind)
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    masks = masks_of(regex("(?s).*"), kind, ends=(0,))
    assert special & set(allowed(masks, ids("a", kind))) == {0}


def test_the_bytes_of_a_character_may_come_one_by_one() -> None:
    masks, output = masks_of(schema({"enum": ["中"]})), ids('"中"')
    assert len(output) == 5
    for count, token in enumerate(output):
        assert token in allowed(masks, output[:count])
    assert allowed(masks, output) == [0]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokens_of_a_text_that_fits_are_allowed(kind: str) -> None:
    end = 2 if kind == "sentencepiece" else 0
    # What follows a prompt has no leading space added, which is where the letter comes in.
    skipped = len(ids("a", kind))
    for text in ('{"name": "hello", "tags": ["ab", 7], "in": {"n": -3}}', '{"name":"中 \\n","tags":[],"in":{"n":0}}'):
        output, masks = ids("a" + text, kind)[skipped:], masks_of(schema(NESTED), kind, ends=(end,))
        for count, token in enumerate(output):
            assert token in allowed(masks, output[:count]), (text, count)
        assert end in allowed(masks, output)


# --- in the draw ---------------------------------------------------------------------------------------------


def rows_for(grammar: Grammar, output: list[int], drafts: list[int], **options: object) -> SamplingRows:
    sampling = SamplingParams(1.0, seed=3, rules=LogitRules(grammar=grammar, end_token_ids=(0,), **options))  # type: ignore[arg-type]
    assert sampling.rules is not None
    context = RuleContext(CompiledRules.of(sampling.rules), token_ids([9, 9, *output, *drafts]), 2, masks_of(grammar))
    return SamplingRows.of_runs([PositionRun(sampling, 2 + len(output), len(drafts) + 1, context)])


def test_a_batch_is_masked_row_by_row_and_left_as_it_was() -> None:
    logits = torch.randn(4, 257, generator=torch.Generator().manual_seed(1))
    before, drafts = logits.clone(), ids("yex")
    rows = rows_for(GRAMMARS["choice"], [], drafts)
    scores = warped_scores(logits, rows)
    assert torch.equal(logits, before)
    for row in range(3):
        expected = allowed(masks_of(GRAMMARS["choice"]), drafts[:row])
        assert scores[row].isfinite().nonzero().flatten().tolist() == expected
    # The third draft breaks the grammar: nothing may follow it, and nobody will look.
    assert scores[3].isnan().all() and draw_tokens(logits, rows)[3] == INVALID_TOKEN
    assert torch.equal(logits, before)


def test_bans_bias_and_penalties_apply_within_the_mask() -> None:
    logits = torch.zeros(1, 257)
    yes, no = ids("y")[0], ids("n")[0]
    biased = rows_for(GRAMMARS["choice"], [], [], logit_bias=((yes, 50.0), (40, 100.0)), repetition_penalty=1.5)
    assert draw_tokens(logits, biased).tolist() == [yes]
    banned = rows_for(GRAMMARS["choice"], [], [], logit_bias=((yes, -100.0),))
    assert draw_tokens(logits, banned).tolist() == [no]
    nothing = rows_for(GRAMMARS["choice"], [], [], logit_bias=((yes, -100.0), (no, -100.0)))
    assert draw_tokens(logits, nothing).tolist() == [INVALID_TOKEN]


def test_min_tokens_holds_ends_back_while_there_is_something_to_say() -> None:
    rows = rows_for(regex("a{1,3}"), [], ids("aaa"), min_tokens=10)
    assert draw_tokens(torch.zeros(4, 257), rows).tolist() == [*ids("aaa"), 0]


# --- mistakes ------------------------------------------------------------------------------------------------


def test_without_the_engine_the_modules_import_and_a_grammar_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(built("bytes")[0].to_str)
    with pytest.raises(GrammarError, match="llguidance, which is not installed"):
        compiler.compile(regex("a"))


def test_a_model_without_tokenizer_is_one_clear_error() -> None:
    with pytest.raises(GrammarError, match=r"no tokenizer.json"):
        GrammarCompiler(lambda: None).compile(regex("a"))


def test_a_parser_that_gives_up_allows_nothing_and_starts_afresh_for_the_next_output() -> None:
    masks = masks_of(regex("ab"))
    masks._matcher.consume_token(250)  # breaks the parser, as its own limits do
    assert masks._matcher.is_error()
    assert allowed(masks, ids("a")) == ids("b")


def test_drafts_beyond_the_vocabulary_break_the_grammar_and_nothing_else() -> None:
    masks = masks_of(regex("ab"))
    assert allowed(masks, [300]) == allowed(masks, [*ids("a"), 257]) == []
    assert allowed(masks, ids("a")) == ids("b")


def test_grammars_are_compiled_once_and_their_sequences_do_not_share_state() -> None:
    compiler = built("bytes")[1]
    assert compiler.compile(regex("ab")) is compiler.compile(regex("ab"))
    first, second = masks_of(regex("ab")), masks_of(regex("ab"))
    assert allowed(first, ids("a")) == ids("b") and allowed(second, []) == ids("a")
