"""Where two decodings of one request part. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.messages import TokenIds


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers differ: `position` counts the answer's tokens from 0.

    `first` and `second` are the ids that stand there; None where that answer ends.
    """

    position: int
    first: int | None
    second: int | None


def first_difference(
    first: "Sequence[int] | TokenIds", second: "Sequence[int] | TokenIds", position: int = 0
) -> Difference | None:
    """Compare id by id; None if the two are equal. `position` is that of their first tokens in the answer."""
    for offset in range(max(len(first), len(second))):
        one, other = _id_at(first, offset), _id_at(second, offset)
        if one != other:
            return Difference(position + offset, one, other)
    return None


def _id_at(ids: "Sequence[int] | TokenIds", index: int) -> int | None:
    return int(ids[index]) if index < len(ids) else None
