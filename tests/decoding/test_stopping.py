"""Where a completion ends, and how much of its text may be shown before that is known."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes import byte_tokenizer, piece_tokenizer
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.decoding.stopping import StopChecker, StopOutcome
from workers.messages import FinishReason, StopConditions, token_ids

BYTES: Tokenizer = byte_tokenizer().backend_tokenizer
END = 0
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids(text: str) -> list[int]:
    encoded: list[int] = BYTES.encode(text, add_special_tokens=False).ids
    return encoded


def outcomes(
    blocks: Sequence[Sequence[int]],
    stop_strings: tuple[str, ...] = (),
    max_tokens: int = 1000,
    tokenizer: Tokenizer = BYTES,
) -> list[StopOutcome]:
    """Push blocks until the completion ends."""
    conditions = StopConditions(max_tokens, frozenset({END}) if tokenizer is BYTES else frozenset(), stop_strings)
    checker = StopChecker(conditions, lambda: IncrementalDetokenizer(tokenizer))
    collected: list[StopOutcome] = []
    for block in blocks:
        collected.append(checker.push(token_ids(list(block))))
        if collected[-1].finish_reason is not None:
            break
    return collected


# --- end tokens and budgets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", range(4))
def test_an_end_token_ends_inside_a_block_and_is_kept_as_its_last_token(before: int) -> None:
    block = [*ids("abc")[:before], END, *ids("xyz")]

    assert outcomes([block]) == [StopOutcome(before + 1, None, STOP)]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_budget_ends_inside_a_block(max_tokens: int) -> None:
    blocks = [ids("abc"), ids("defgh")]

    collected = outcomes(blocks, max_tokens=max_tokens)

    assert sum(outcome.kept_tokens for outcome in collected) == max_tokens
    assert [outcome.finish_reason for outcome in collected[:-1]] == [None] * (len(collected) - 1)
    assert collected[-1].finish_reason is LENGTH


def test_an_end_token_that_is_also_the_last_of_the_budget_is_a_stop() -> None:
    assert outcomes([[*ids("ab"), END]], max_tokens=3) == [StopOutcome(3, None, STOP)]


def test_an_end_token_beyond_the_budget_is_never_seen() -> None:
    assert outcomes([[*ids("ab"), END]], max_tokens=2) == [StopOutcome(2, None, LENGTH)]


def test_without_stop_strings_everything_may_be_shown_and_no_text_is_made() -> None:
    def unexpected() -> IncrementalDetokenizer:
        raise AssertionError("nothing to watch, so nothing to decode")

    checker = StopChecker(StopConditions(5), unexpected)

    assert checker.push(token_ids(ids("abc"))) == StopOutcome(3, None, None)


def test_an_empty_block_changes_nothing() -> None:
    assert outcomes([[], ids("a"), []], stop_strings=("ab",)) == [
        StopOutcome(0, 0, None),
        StopOutcome(1, 0, None),
        StopOutcome(0, 0, None),
    ]


# --- stop strings --------------------------------------------------------------------------------------------


def test_a_stop_string_ends_inside_a_block() -> None:
    assert outcomes([ids("one two three")], ("two",)) == [StopOutcome(7, 4, STOP)]


def test_a_stop_string_is_found_across_blocks_and_its_beginning_is_held_back() -> None:
    assert outcomes([ids("one t"), ids("w"), ids("o three")], ("two",)) == [
        StopOutcome(5, 4, None),
        StopOutcome(1, 4, None),
        StopOutcome(1, 4, STOP),
    ]


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert outcomes([ids("abcdef")], ("ef", "cd", "zz")) == [StopOutcome(4, 2, STOP)]
    assert outcomes([ids("abcdef")], ("f", "bcdef")) == [StopOutcome(6, 1, STOP)]


def test_a_beginning_that_leads_nowhere_is_released() -> None:
    assert outcomes([ids("say tw"), ids("ice")], ("two",)) == [StopOutcome(6, 4, None), StopOutcome(3, 9, None)]


def test_a_beginning_within_a_beginning_is_followed() -> None:
    assert outcomes([ids("aa"), ids("ab"), ids("x")], ("aab",)) == [StopOutcome(2, 0, None), StopOutcome(2, 1, STOP)]


def test_a_stop_string_of_one_character_holds_nothing_back() -> None:
    assert outcomes([ids("ab"), ids("c.")], (".",)) == [StopOutcome(2, 2, None), StopOutcome(2, 3, STOP)]


def test_a_stop_string_is_found_whose_characters_are_split_over_tokens_and_blocks() -> None:
    blocks = [[token] for token in ids("é日本")]

    collected = outcomes(blocks, ("日本",))

    assert [outcome.visible_characters for outcome in collected] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert collected[-1] == StopOutcome(1, 1, STOP)


def test_the_budget_releases_a_held_back_beginning() -> None:
    assert outcomes([ids("say tw")], ("two",), max_tokens=6) == [StopOutcome(6, None, LENGTH)]


def test_a_stop_string_completed_by_the_last_token_of_the_budget_is_a_stop() -> None:
    assert outcomes([ids("say two!")], ("two",), max_tokens=7) == [StopOutcome(7, 4, STOP)]


def test_a_stop_string_completed_by_the_unfinished_character_at_the_budget_is_a_stop() -> None:
    # The bytes of a character that is cut off are shown as a replacement character, which may be asked to stop at.
    cut = ids("ab日")[:-1]

    assert outcomes([cut], ("b\N{REPLACEMENT CHARACTER}",), max_tokens=len(cut)) == [StopOutcome(len(cut), 1, STOP)]


def test_an_end_token_releases_a_held_back_beginning() -> None:
    assert outcomes([[*ids("say tw"), END]], ("two",)) == [StopOutcome(7, None, STOP)]


def test_an_end_token_after_an_unfinished_character_still_looks_for_stop_strings() -> None:
    cut = ids("ab日")[:-1]

    assert outcomes([[*cut, END]], ("b\N{REPLACEMENT CHARACTER}",)) == [StopOutcome(len(cut) + 1, 1, STOP)]


def test_text_after_an_end_token_is_not_searched() -> None:
    assert outcomes([[*ids("a"), END, *ids("two")]], ("two",)) == [StopOutcome(2, None, STOP)]


# --- invariants ----------------------------------------------------------------------------------------------

# A small alphabet makes stop strings, their beginnings and overlaps frequent.
small_text = st.text(alphabet="ab日", min_size=1, max_size=5)
stop_strings = st.lists(small_text, min_size=1, max_size=3).map(tuple)


def blocks_of(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    blocks, start = [], 0
    for size in [*sizes, len(tokens)]:
        blocks.append(tokens[start : start + size])
        start += size
    return [block for block in blocks if block]


def shown(collected: Sequence[StopOutcome], text: str) -> str:
    return text[: collected[-1].visible_characters]


@given(
    pieces=st.lists(small_text, min_size=1, max_size=14),
    stop=small_text,
    sizes=st.lists(st.integers(1, 4), max_size=14),
)
@settings(max_examples=300)
def test_the_text_ends_before_the_stop_string_however_it_is_split(
    pieces: list[str], stop: str, sizes: list[int]
) -> None:
    text = "".join(pieces)
    as_bytes, as_pieces = ids(text), list(range(len(pieces)))
    expected = text[: text.find(stop)] if stop in text else text

    of_bytes = outcomes(blocks_of(as_bytes, sizes), (stop,), len(as_bytes))
    of_pieces = outcomes(blocks_of(as_pieces, sizes), (stop,), len(pieces), piece_tokenizer(pieces))

    for collected in (of_bytes, of_pieces):
        assert shown(collected, text) == expected
        assert collected[-1].finish_reason is (STOP if stop in text else LENGTH)


@given(
    pieces=st.lists(small_text, min_size=1, max_size=14),
    stops=stop_strings,
    sizes=st.lists(st.integers(1, 4), max_size=14),
    budget=st.integers(1, 14),
)
@settings(max_examples=300)
def test_blocks_do_not_matter_and_nothing_is_shown_that_the_final_text_does_not_have(
    pieces: list[str], stops: tuple[str, ...], sizes: list[int], budget: int
) -> None:
    budget = min(budget, len(pieces))
    tokenizer, tokens = piece_tokenizer(pieces), list(range(len(pieces)))

    collected = outcomes(blocks_of(tokens, sizes), stops, budget, tokenizer)
    singly = outcomes([[token] for token in tokens], stops, budget, tokenizer)

    kept = sum(outcome.kept_tokens for outcome in collected)
    text = "".join(pieces[:kept])
    assert kept == sum(outcome.kept_tokens for outcome in singly)
    assert collected[-1].finish_reason is singly[-1].finish_reason
    assert shown(collected, text) == shown(singly, text)
    final = len(shown(collected, text))
    visible = [outcome.visible_characters for outcome in collected[:-1]]
    assert all(limit is not None and limit <= final for limit in visible)
    assert visible == sorted(visible, key=lambda limit: limit or 0)
    # The definition, without any buffer: the first token that completes a stop string ends the text before it.
    for count in range(1, kept + 1):
        found = [start for stop in stops if (start := "".join(pieces[:count]).find(stop)) >= 0]
        assert bool(found) is (count == kept and collected[-1].finish_reason is STOP)
        if found:
            assert final == min(found)


# --- min_tokens ----------------------------------------------------------------------------------------------


def after_at_least(min_tokens: int, blocks: Sequence[Sequence[int]], stop: str, max_tokens: int = 1000) -> StopOutcome:
    conditions = StopConditions(max_tokens, frozenset({END}), (stop,), min_tokens)
    checker = StopChecker(conditions, lambda: IncrementalDetokenizer(BYTES))
    collected = [StopOutcome(0, None, None)]
    for block in blocks:
        collected.append(checker.push(token_ids(list(block))))
        if collected[-1].finish_reason is not None:
            break
    return StopOutcome(sum(outcome.kept_tokens for outcome in collected), *_rest(collected[-1]))


def _rest(outcome: StopOutcome) -> tuple[int | None, FinishReason | None]:
    return outcome.visible_characters, outcome.finish_reason


@pytest.mark.parametrize("block", [1, 2, 8])
def test_a_stop_string_that_min_tokens_completes_is_passed_over(block: int) -> None:
    tokens = ids("ab..cd..ef")
    blocks = [tokens[start : start + block] for start in range(0, len(tokens), block)]

    assert after_at_least(3, blocks, "..") == StopOutcome(4, 2, STOP)
    assert after_at_least(4, blocks, "..") == StopOutcome(8, 6, STOP)
    assert after_at_least(7, blocks, "..") == StopOutcome(8, 6, STOP)
    assert after_at_least(8, blocks, "..", max_tokens=10) == StopOutcome(10, None, LENGTH)
    assert after_at_least(10, blocks, "..", max_tokens=10) == StopOutcome(10, None, LENGTH)


def test_a_stop_string_may_begin_before_min_tokens_and_end_after_it() -> None:
    assert after_at_least(2, [ids("aa"), ids("ab")], "aa") == StopOutcome(3, 1, STOP)


def test_an_unfinished_character_at_the_end_of_min_tokens_is_not_searched() -> None:
    cut = ids("b日")[:-1]
    replaced = "b\N{REPLACEMENT CHARACTER}"

    assert after_at_least(len(cut), [cut], replaced, max_tokens=len(cut)) == StopOutcome(len(cut), None, LENGTH)
    assert after_at_least(len(cut) - 1, [cut], replaced, max_tokens=len(cut)) == StopOutcome(len(cut), 0, STOP)
