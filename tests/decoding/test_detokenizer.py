"""Ids to text, block by block: exact, whole characters only, and never a piece of the prompt."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes import byte_tokenizer
from workers.decoding.detokenizer import PRIMING_TOKENS, IncrementalDetokenizer

BYTES: Tokenizer = byte_tokenizer().backend_tokenizer
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
byte_ids = st.lists(st.integers(1, 256), max_size=12)


def encode(text: str) -> list[int]:
    ids: list[int] = BYTES.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: Sequence[int]) -> str:
    text: str = BYTES.decode(list(ids), skip_special_tokens=True)
    return text


def pieces_of(blocks: Sequence[Sequence[int]], prompt: Sequence[int] = ()) -> list[str]:
    """What each block makes certain, and the tail."""
    detokenizer = IncrementalDetokenizer(BYTES, prompt)
    return [detokenizer.push(block) for block in blocks] + [detokenizer.finish()]


def split(ids: Sequence[int], block: int) -> list[Sequence[int]]:
    return [ids[start : start + block] for start in range(0, len(ids), block)]


@pytest.mark.parametrize("block", range(1, 8))
def test_characters_of_several_bytes_appear_whole_in_blocks_of_any_size(block: int) -> None:
    text = "日本🙂é x, 👩‍👩‍👧 ñ"

    pieces = pieces_of(split(encode(text), block))

    assert "".join(pieces) == text
    assert not any(UNFINISHED in piece for piece in pieces)


@given(text=st.text(max_size=20), blocks=st.lists(st.integers(1, 6), min_size=1, max_size=40))
@example(text="a�", blocks=[1])
@example(text="�b", blocks=[1])
@settings(max_examples=150)
def test_the_pieces_join_to_the_exact_text_in_any_split(text: str, blocks: list[int]) -> None:
    ids = encode(text)
    parts, start = [], 0
    for size in [*blocks, len(ids)]:
        parts.append(ids[start : start + size])
        start += size

    assert "".join(pieces_of(parts)) == text


@given(prompt=byte_ids, completion=byte_ids, block=st.integers(1, 5))
@example(prompt=encode("hello 日")[:-1], completion=[*encode("日")[-1:], *encode("x")], block=1)
@example(prompt=encode("hello �"), completion=encode("abc"), block=1)
@example(prompt=encode("日本語"), completion=encode("日x"), block=2)
@settings(max_examples=300)
def test_any_bytes_after_any_prompt_give_the_text_of_the_completion_alone(
    prompt: list[int], completion: list[int], block: int
) -> None:
    assert "".join(pieces_of(split(completion, block), prompt)) == decode(completion)


def test_special_tokens_give_no_text() -> None:
    a, b = encode("ab")

    assert pieces_of([[0, a], [0], [0, 0], [b, 0]]) == ["a", "", "", "b", ""]


def test_a_character_that_never_becomes_whole_is_given_at_the_end_and_only_once() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)

    assert detokenizer.push(encode("a日")[:-1]) == "a"
    assert detokenizer.finish() == UNFINISHED
    assert detokenizer.finish() == ""


def test_only_the_end_of_a_long_prompt_is_looked_at() -> None:
    prompt = encode("x" * PRIMING_TOKENS)

    assert pieces_of([encode("yz")], [0] * 10_000 + prompt) == ["yz", ""]
