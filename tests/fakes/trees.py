"""A stand-in for a drafter that proposes trees; see workers.py beside this."""

from collections.abc import Sequence

from tests.fakes import Guess, HeldSequence, ScriptedWorker
from workers.messages import (
    NO_PROPOSAL,
    Proposal,
    ProposedItem,
    ProposeRequest,
    ProposeResponse,
    SamplingParams,
    VerifyRequest,
    WorkerResponse,
    WorkerRole,
    token_ids,
)


def grow_tree(
    history: Sequence[int], sampling: SamplingParams, guesses: Sequence[Guess], nodes: int
) -> tuple[list[int], list[int]]:
    """The union of what each of `guesses` would draft, level by level, `nodes` nodes at most: token ids and parents."""
    ids: list[int] = []
    parents: list[int] = []
    chains = [(-1, list(history)) for _ in guesses]  # where each guess has got to
    grows = True
    while grows:
        grows = False
        for index, guess in enumerate(guesses):
            parent, seen = chains[index]
            token = guess(seen, sampling)
            known = [node for node in range(len(ids)) if (parents[node], ids[node]) == (parent, token)]
            if not known:
                if len(ids) >= nodes:
                    continue
                ids.append(token)
                parents.append(parent)
            chains[index] = (known[0] if known else len(ids) - 1, [*seen, token])
            grows = True
    return ids, parents


class ScriptedTreeDrafter(ScriptedWorker):
    """Drafts trees, the union of what `guesses` say, and keeps the KV of the commits alone."""

    def __init__(self, *guesses: Guess, worker_id: str = "draft-0", **options: object) -> None:
        super().__init__(worker_id, WorkerRole.DRAFT, **({"name": "toy-trees"} | options))  # type: ignore[arg-type]
        self._guesses = guesses
        self.proposals: list[Proposal] = []

    def answer(self, message: ProposeRequest | VerifyRequest, epochs_late: int) -> WorkerResponse:
        """See `workers.drafters.base.Drafter.propose`."""
        assert isinstance(message, ProposeRequest)
        followed = self.follow(message.items)
        self.check_room()
        answers = []
        for item in message.items:
            held = followed.get(item.sequence_id)
            proposal = NO_PROPOSAL
            if held is not None and item.draft_tokens:
                proposal = self.propose(held, item.draft_tokens)
                self.proposals.append(proposal)
            answers.append(ProposedItem(item.sequence_id, item.epoch - epochs_late, proposal, lost=held is None))
        return ProposeResponse(tuple(answers), compute_ms=1.0)

    def propose(self, held: HeldSequence, draft_tokens: int) -> Proposal:
        """Return a tree of at most `draft_tokens` nodes."""
        ids, parents = grow_tree(held.tokens, held.sampling, self._guesses, draft_tokens)
        return Proposal(token_ids(ids), token_ids(parents))
