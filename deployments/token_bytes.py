"""What a single token stands for, as bytes: characters may be spread over several tokens."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a tokenizer. Joined, those of a text's tokens are the text in UTF-8.

    Exact for byte-level vocabularies and for tokens such as `<0xE6>`; other tokens are whole characters.
    """

    def __init__(self, backend: "Tokenizer") -> None:
        self._backend = backend
        self._literal = frozenset(backend.get_added_tokens_decoder())
        decoder = backend.decoder.__getstate__() if backend.decoder is not None else b""
        self._byte_level = dict(_byte_level_alphabet()) if b'"ByteLevel"' in decoder else None
        self._byte_fallback = b'"ByteFallback"' in decoder
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; none for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """Return the token's text, where bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _find(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._literal:
            return token.encode()
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._byte_level is not None and all(letter in self._byte_level for letter in token):
            return bytes(self._byte_level[letter] for letter in token)
        return self._inside_a_text(token_id).encode()

    def _inside_a_text(self, token_id: int) -> str:
        """Decode the token as it reads behind another one: decoders like sentencepiece's trim the start of a text."""
        alone = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :] if twice.startswith(alone) else alone


def _byte_level_alphabet() -> Iterator[tuple[str, int]]:
    """Yield the letter that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    unprintable = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte), byte
        else:
            yield chr(256 + unprintable), byte
            unprintable += 1
