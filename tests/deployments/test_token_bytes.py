"""What single tokens stand for, with the decoders that tokenizers have."""

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from deployments.token_bytes import TokenBytes
from tests.fakes import byte_tokenizer, piece_tokenizer

VOCABULARY = {"<unk>": 0, "▁foo": 1, "bar": 2, "▁": 3, "<0xE6>": 4, "<0x97>": 5, "<0xA5>": 6, "日": 7}


@pytest.fixture
def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_a_byte_level_token_is_its_bytes_whole_character_or_not() -> None:
    backend = byte_tokenizer().backend_tokenizer
    tokens = TokenBytes(backend)
    assert sorted(tokens.bytes_of(token) for token in range(1, 257)) == [bytes([byte]) for byte in range(256)]
    ids = backend.encode("日 é\n").ids
    assert b"".join(map(tokens.bytes_of, ids)).decode() == "日 é\n"
    assert [tokens.text_of(token) for token in ids[:4]] == ["\ufffd", "\ufffd", "\ufffd", " "]


def test_a_special_token_is_its_name() -> None:
    assert TokenBytes(byte_tokenizer().backend_tokenizer).text_of(0) == "<|endoftext|>"


def test_sentencepiece_tokens_keep_their_leading_space_and_byte_tokens_are_bytes(sentencepiece: Tokenizer) -> None:
    tokens = TokenBytes(sentencepiece)
    assert [tokens.text_of(token) for token in (1, 2, 3, 7)] == [" foo", "bar", " ", "日"]
    assert b"".join(map(tokens.bytes_of, (4, 5, 6))).decode() == "日"
    assert tokens.text_of(4) == "\ufffd"


def test_an_id_without_a_token_stands_for_nothing() -> None:
    tokens = TokenBytes(piece_tokenizer(["a", "bc"]))
    assert [tokens.text_of(token) for token in (0, 1, 2, 5000)] == ["a", "bc", "", ""]
