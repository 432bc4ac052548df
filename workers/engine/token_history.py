"""What a worker has read of one sequence, for all that looks back."""

import numpy as np

from workers.messages import NO_TOKENS, TokenIds


class TokenHistory:
    """The tokens at positions 0 onwards. Nothing is derived and kept, so nothing can drift after a rollback."""

    def __init__(self) -> None:
        self._buffer = NO_TOKENS
        self._length = 0

    @property
    def tokens(self) -> TokenIds:
        """A view of the tokens, int32 [length], that holds until the next `write`."""
        return self._buffer[: self._length]

    def write(self, first_position: int, token_ids: TokenIds) -> None:
        """Forget what stands from `first_position` on, and append `token_ids` there.

        Raises ValueError when that would leave a gap.
        """
        if first_position > self._length:
            raise ValueError(f"cannot write at position {first_position} after {self._length} tokens")
        length = first_position + len(token_ids)
        if length > len(self._buffer):
            grown = np.empty(max(length, 2 * len(self._buffer)), dtype=np.int32)
            grown[:first_position] = self._buffer[:first_position]
            self._buffer = grown
        self._buffer[first_position:length] = token_ids
        self._length = length
