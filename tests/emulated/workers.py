"""Synthetic workers and messages to them, as the tests here need them."""

from collections.abc import Sequence
from typing import Any

from workers.emulated.drafter import SyntheticDrafter
from workers.emulated.language import AcceptanceProfile, SyntheticLanguage
from workers.emulated.sequences import SyntheticSize
from workers.emulated.target import SyntheticTarget
from workers.messages import (
    Branch,
    DraftAheadItem,
    DraftAheadRequest,
    Proposal,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

LANGUAGE = SyntheticLanguage(1_000)
SIZE = SyntheticSize(context_length=4_096, block_tokens=4, total_blocks=4_096)
PROMPT = [0, 7, 8, 9, 10]
SAMPLING = SamplingParams(seed=5)


def target(size: SyntheticSize = SIZE) -> SyntheticTarget:
    return SyntheticTarget(LANGUAGE, size)


def drafter(size: SyntheticSize = SIZE, name: str = "synthetic", **profile: Any) -> SyntheticDrafter:
    return SyntheticDrafter(LANGUAGE, size, AcceptanceProfile(**profile), name)


def starting(first_position: int, prompt: Sequence[int]) -> dict[str, Any]:
    """What an item has that starts a sequence."""
    return {} if first_position else {"sampling": SAMPLING, "prompt_tokens": len(prompt)}


def verify(
    worker: SyntheticTarget, first_position: int, committed: Sequence[int], drafts: Sequence[int] = (), **fields: Any
) -> VerifiedItem:
    """Verify for sequence 1."""
    proposal = Proposal(token_ids(drafts))
    fields = starting(first_position, PROMPT) | fields
    item = VerifyItem(1, 3, first_position, token_ids(committed), proposal, **fields)
    return worker.verify(VerifyRequest((item,))).items[0]


def propose(
    worker: SyntheticDrafter, first_position: int, committed: Sequence[int], draft_tokens: int, **fields: Any
) -> ProposedItem:
    """Propose for sequence 1."""
    fields = starting(first_position, PROMPT) | fields
    item = ProposeItem(1, 3, first_position, token_ids(committed), draft_tokens, **fields)
    return worker.propose(ProposeRequest((item,))).items[0]


def draft_ahead(
    worker: SyntheticDrafter,
    first_position: int,
    committed: Sequence[int],
    drafts: Sequence[int],
    draft_tokens: int = 3,
    branches: int = 64,
) -> tuple[Branch, ...]:
    """Draft ahead for sequence 1."""
    item = DraftAheadItem(1, 3, first_position, token_ids(committed), token_ids(drafts), draft_tokens, branches)
    return worker.draft_ahead(DraftAheadRequest((item,))).items[0].branches
