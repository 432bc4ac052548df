"""Token ids to text, piece by piece, without ever splitting a character."""

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Sentencepiece decoders drop the first token's leading space unless they have seen what stands before it.
PRIMING_TOKENS = 8


class IncrementalDetokenizer:
    """Decodes one completion. Characters whose bytes are spread over tokens appear when they are whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._priming = _whole_characters(tokenizer, [int(token) for token in prompt][-PRIMING_TOKENS:])
        self._stream = DecodeStream(ids=self._priming, skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._pending_from = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that became certain with `token_ids`."""
        pieces = []
        for token in token_ids:
            self._token_ids.append(int(token))
            piece = self._stream.step(self._tokenizer, int(token))
            if piece is not None:
                pieces.append(piece)
                self._pending_from = len(self._token_ids)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the tail that was held back because its last character never became whole."""
        pending = self._token_ids[self._pending_from :]
        self._pending_from = len(self._token_ids)
        return self._tokenizer.decode(pending, skip_special_tokens=True) if pending else ""


def _whole_characters(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    """Return `token_ids` without an unfinished last character: primed with it, the stream would repeat the prompt."""
    while token_ids and tokenizer.decode(token_ids, skip_special_tokens=True).endswith("\N{REPLACEMENT CHARACTER}"):
        token_ids = token_ids[:-1]
    return token_ids
