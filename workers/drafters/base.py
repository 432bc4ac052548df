"""The protocol of a drafter: whatever can continue sequences by a few guesses."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from workers.messages import DraftAheadRequest, DraftAheadResponse, ProposeRequest, ProposeResponse, WorkerStats


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """What the router must respect: tokens per sequence, and KV blocks of `block_tokens` tokens."""

    vocabulary_size: int
    context_length: int
    block_tokens: int
    total_blocks: int


class Drafter(Protocol):
    """Proposes tokens for sequences that it follows commit by commit.

    A drafter may guess anything: the target draws its own tokens, so a wrong guess costs time and never text.
    """

    @property
    def limits(self) -> DrafterLimits:
        """What this drafter can hold."""
        ...

    def propose(self, request: ProposeRequest) -> ProposeResponse:
        """Follow each item's commits, then draft its number of tokens at most; answers in the order of the items.

        The nodes of a tree count one by one.

        An item that continues a sequence unknown here is answered with `lost` and changes nothing.
        """
        ...

    def draft_ahead(self, request: DraftAheadRequest) -> DraftAheadResponse:
        """Read each item's commits and drafts, and draft behind what may come of these; in the order of the items.

        A branch's proposal is what `propose` would give if the branch came true. There may be fewer than asked for, or
        none. An item that continues a sequence unknown here is answered with `lost` and changes nothing.
        """
        ...

    def release(self, sequence_ids: Iterable[int] | None) -> None:
        """Forget these sequences (None: all) and free what they hold; unknown ids are ignored."""
        ...

    def stats(self) -> WorkerStats:
        """Return the current KV accounting."""
        ...
