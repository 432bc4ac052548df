"""Each rule changes single logits as transformers' own processor does, with the history of its position."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from workers.decoding.logit_edits import LogitEdits, RuledRun
from workers.decoding.logit_rules import CompiledRules, RuleContext
from workers.decoding.sampling import INVALID_TOKEN, PositionRun, SamplingRows, draw_tokens
from workers.messages import LogitRules, SamplingParams, token_ids

VOCABULARY = 24
histories = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)
some_ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6, unique=True).map(tuple)


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32))


def context(rules: LogitRules, tokens: list[int], prompt_tokens: int) -> RuleContext:
    return RuleContext(CompiledRules.of(rules), token_ids(tokens), prompt_tokens)


def edited(rules: LogitRules, tokens: list[int], prompt_tokens: int, logits: torch.Tensor) -> torch.Tensor:
    """`logits` [rows, V] of the last positions that `tokens` lead to, the last one being `len(tokens)`, after rules."""
    positions = range(len(tokens) + 1 - len(logits), len(tokens) + 1)
    with LogitEdits.of_runs([RuledRun(0, positions, context(rules, tokens, prompt_tokens))]).applied_to(logits):
        return logits.clone()


@given(history=histories, data=st.data(), ends=some_ids, min_tokens=st.integers(1, 12))
@settings(max_examples=50)
def test_min_tokens_holds_ends_back_as_transformers_does(
    history: list[int], data: st.DataObject, ends: tuple[int, ...], min_tokens: int
) -> None:
    prompt_tokens = data.draw(st.integers(1, len(history)))
    logits = some_logits(1)

    processor = MinNewTokensLengthLogitsProcessor(prompt_tokens, min_tokens, list(ends))
    expected = processor(torch.tensor([history]), logits)

    assert torch.equal(edited(LogitRules(min_tokens, ends), history, prompt_tokens, logits), expected)


@given(ids=some_ids, biases=st.lists(st.integers(-199, 200).map(lambda half: half / 2), min_size=6, max_size=6))
@settings(max_examples=50)
def test_biases_are_added_as_transformers_does(ids: tuple[int, ...], biases: list[float]) -> None:
    logits = some_logits(3)
    pairs = tuple(zip(ids, biases, strict=False))

    expected = SequenceBiasLogitsProcessor({(token,): bias for token, bias in pairs})(torch.zeros((3, 1)), logits)

    assert torch.equal(edited(LogitRules(logit_bias=pairs), [1, 2, 3], 1, logits), expected)


def test_the_smallest_bias_bans_even_the_largest_logit() -> None:
    logits = some_logits(1)
    logits[0, 4] = 1e6

    for temperature in (0.0, 1.0):
        run = PositionRun(
            SamplingParams(temperature), 3, 1, context(LogitRules(logit_bias=((4, -100.0),)), [1, 2, 3], 1)
        )
        assert draw_tokens(logits, SamplingRows.of_runs([run])).item() not in (4, INVALID_TOKEN)


@given(history=histories, penalty=st.sampled_from([0.5, 0.9, 1.1, 1.3, 2.0, 30.0]))
@settings(max_examples=50)
def test_repetition_is_penalised_as_transformers_does(history: list[int], penalty: float) -> None:
    logits = some_logits(1)

    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits.clone())

    for prompt_tokens in range(len(history) + 1):
        assert torch.equal(edited(LogitRules(repetition_penalty=penalty), history, prompt_tokens, logits), expected)


@given(
    history=histories,
    data=st.data(),
    presence=st.sampled_from([0.0, -2.0, 0.5]),
    frequency=st.sampled_from([0.0, -0.25, 1.5]),
)
@settings(max_examples=50)
def test_presence_and_frequency_count_the_output_alone(
    history: list[int], data: st.DataObject, presence: float, frequency: float
) -> None:
    prompt_tokens = data.draw(st.integers(0, len(history)))
    logits = some_logits(1)

    # OpenAI's formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
    counts = np.bincount(history[prompt_tokens:], minlength=VOCABULARY).astype(np.float32)
    expected = logits - frequency * torch.from_numpy(counts) - presence * torch.from_numpy(counts > 0)

    rules = LogitRules(presence_penalty=presence, frequency_penalty=frequency)
    assert torch.allclose(edited(rules, history, prompt_tokens, logits), expected, atol=1e-5)


def test_bias_is_added_before_the_repetition_penalty_and_frequency_is_taken_off_after_it() -> None:
    rules = LogitRules(logit_bias=((1, 3.0),), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = torch.tensor([[1.0, -1.0, -5.0]])

    assert edited(rules, [0, 1, 1], 1, logits).tolist() == [[0.5, (-1 + 3) / 2 - 2 * 0.5 - 0.25, -5.0]]


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_extreme_penalties_and_temperatures_stay_finite(penalty: float, temperature: float) -> None:
    rules = LogitRules(repetition_penalty=penalty, frequency_penalty=2.0)
    logits = torch.tensor([[1e4, -1e4, 3.0, -3.0, 0.0]])
    changed = edited(rules, [0, 1, 2, 3, 4], 1, logits)
    run = PositionRun(SamplingParams(temperature, top_p=0.9), 5, 1, context(rules, [0, 1, 2, 3, 4], 1))

    assert changed.isfinite().all()
    expected = changed.argmax().item()
    assert draw_tokens(logits, SamplingRows.of_runs([run])).tolist() == [expected]


words = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8).map(tuple)


@given(bad_words=words, prompt=st.lists(st.integers(0, 4), max_size=5), output=st.lists(st.integers(0, 4), max_size=8))
@settings(max_examples=50)
def test_bad_words_are_banned_as_transformers_does_in_a_text_of_output_alone(
    bad_words: tuple[tuple[int, ...], ...], prompt: list[int], output: list[int]
) -> None:
    logits = some_logits(1)

    processor = NoBadWordsLogitsProcessor([list(word) for word in bad_words])
    expected = processor(torch.tensor([output], dtype=torch.int64), logits)

    assert torch.equal(edited(LogitRules(bad_words=bad_words), prompt + output, len(prompt), logits), expected)


@given(bad_words=words, prompt=st.lists(st.integers(0, 4), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=50)
def test_no_output_ever_holds_a_bad_word(bad_words: tuple[tuple[int, ...], ...], prompt: list[int], seed: int) -> None:
    tokens, sampling = list(prompt), SamplingParams(temperature=1.0, seed=seed)
    for position in range(len(prompt), len(prompt) + 15):
        run = PositionRun(sampling, position, 1, context(LogitRules(bad_words=bad_words), tokens, len(prompt)))
        tokens += draw_tokens(torch.zeros(1, 7), SamplingRows.of_runs([run])).tolist()

    output = tuple(tokens[len(prompt) :])
    for word in bad_words:
        assert all(output[start : start + len(word)] != word for start in range(len(output)))


# --- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1.0])
def test_a_row_whose_rules_leave_nothing_is_marked_and_leaves_its_neighbours_alone(temperature: float) -> None:
    everything = LogitRules(logit_bias=tuple((token, -100.0) for token in range(VOCABULARY)))
    sampling = SamplingParams(temperature, top_k=5, top_p=0.9, seed=4)
    plain = PositionRun(sampling, 7, 2)
    banned = PositionRun(sampling, 3, 1, context(everything, [1, 2, 3], 1))
    logits = some_logits(5)
    alone = draw_tokens(logits[:2], SamplingRows.of_runs([plain])).tolist()
    after = draw_tokens(logits[3:], SamplingRows.of_runs([plain])).tolist()

    drawn = draw_tokens(logits, SamplingRows.of_runs([plain, banned, plain])).tolist()

    assert drawn == [*alone, INVALID_TOKEN, *after]


def test_rows_without_rules_have_no_edits() -> None:
    assert SamplingRows.of_runs([PositionRun(SamplingParams(), 3, 2)]).edits is None


def test_drawing_with_rules_leaves_the_logits_as_they_were_even_where_rules_meet() -> None:
    logits = some_logits(3)
    logits[1, 4] = torch.nan
    before = logits.clone()
    rules = LogitRules(5, (4, 4, 1), ((1, 5.0), (2, -100.0)), 2.0, 1.0, 1.0, ((2,), (4, 1)))
    run = PositionRun(SamplingParams(), 2, 3, context(rules, [1, 2, 4, 4], 1))

    draw_tokens(logits, SamplingRows.of_runs([run]))

    assert torch.equal(logits.nan_to_num(7e7), before.nan_to_num(7e7))


def test_parameters_without_rules_stay_small_on_the_wire() -> None:
    assert len(pickle.dumps(SamplingParams(0.7, 40, 0.95, seed=2**63 - 1, min_p=0.1))) < 150
