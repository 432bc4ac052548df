"""Workers without a model behind links. They keep state as real workers do and refuse what none could follow."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tests.fakes.toy import FIRST_TOY_OUTPUT, TOY_VOCABULARY, Guess, toy_logprobs, toy_lookup, toy_next
from tests.fakes.troubles import HeldSequence, Poison, StepRequest, Trouble
from workers.errors import DeadlineExceededError, LinkClosedError, LinkError
from workers.messages import (
    Branch,
    DraftAheadItem,
    DraftAheadRequest,
    DraftAheadResponse,
    DraftedAheadItem,
    Proposal,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    ProposeResponse,
    ReleaseRequest,
    StatsRequest,
    TokenLogprobs,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    WorkerRegistration,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
    WorkerStats,
    token_ids,
)


class ProtocolViolation(AssertionError):
    """The router sent what a real worker could not follow."""


@dataclass
class ScriptedWorker:
    """A link and the worker at its end. The state changes as messages are sent, in order; answers take `delay_s`.

    `troubles` gives what happens at which step (counted from 0 over the worker's lives); `every_step` at all others.
    What is in a step may be `poison`; `poisonings` are the numbers of sequences in such steps.
    A `trusting` worker reads tokens that the toy target would not have drawn. One with `prefix_caching` remembers the
    prefixes of whole blocks that it has read, as long as it lives.
    """

    worker_id: str
    role: WorkerRole
    name: str
    context_length: int = 256
    block_tokens: int = 4
    total_blocks: int = 4096
    vocabulary_size: int = TOY_VOCABULARY
    delay_s: float = 0.0
    troubles: dict[int, Trouble] = field(default_factory=dict)
    every_step: Trouble | None = None
    poison: Poison | None = None
    dead: bool = False
    trusting: bool = False
    prefix_caching: bool = False
    prefix_hits: int = 0
    remembered: set[tuple[int, ...]] = field(default_factory=set)
    steps: int = 0
    poisonings: list[int] = field(default_factory=list)
    held: dict[int, HeldSequence] = field(default_factory=dict)
    messages: list[WorkerRequest] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def registration(self) -> WorkerRegistration:
        """What the worker says of itself."""
        return WorkerRegistration(
            self.worker_id,
            self.role,
            self.name,
            (1,),
            self.vocabulary_size,
            self.context_length,
            self.block_tokens,
            self.total_blocks,
        )

    def die(self) -> None:
        """Lose everything and answer nothing any more."""
        self.dead = True
        self.held.clear()
        self.remembered.clear()

    def revive(self) -> None:
        """Start anew, with nothing."""
        self.dead = False

    async def call(self, message: WorkerRequest, deadline_s: float) -> WorkerResponse | None:
        """See `workers.links.Link.call`."""
        if self.dead:
            raise LinkClosedError("the worker is gone")
        self.messages.append(message)
        match message:
            case ReleaseRequest(sequence_ids):
                for sequence_id in list(self.held) if sequence_ids is None else sequence_ids:
                    self.held.pop(sequence_id, None)
                await asyncio.sleep(0)
                return None
            case StatsRequest():
                await asyncio.sleep(0)
                return WorkerStats(len(self.held), self.total_blocks - self._blocks(), self.total_blocks)
            case ProposeRequest() | VerifyRequest() | DraftAheadRequest():
                return await self._step(message, deadline_s)

    async def _step(self, message: StepRequest, deadline_s: float) -> WorkerResponse:
        trouble = self.troubles.get(self.steps, self.every_step)
        if self.poison is not None and self.poison.is_in(message, self.held):
            self.poisonings.append(len(message.items))
            trouble = self.poison.trouble
        self.steps += 1
        if trouble is Trouble.DEATH:
            self.die()
        if trouble is Trouble.FORGET:
            self.held.clear()
        answer = None if self.dead else self.answer(message, epochs_late=1 if trouble is Trouble.STALE else 0)
        await asyncio.sleep(min(self.delay_s, deadline_s))
        if self.dead or answer is None:
            raise LinkClosedError("the worker is gone")
        if trouble is Trouble.ERROR:
            raise LinkError("the worker failed")
        if trouble is Trouble.TIMEOUT or self.delay_s > deadline_s:
            raise DeadlineExceededError("the worker is late")
        return answer

    def answer(self, message: StepRequest, epochs_late: int) -> WorkerResponse:
        """Do one step."""
        raise NotImplementedError

    def follow(self, items: Iterable[ProposeItem | VerifyItem]) -> dict[int, HeldSequence]:
        """Bring the held sequences up to date; those that are lost are left out."""
        followed: dict[int, HeldSequence] = {}
        for item in items:
            self.require(item.sequence_id not in followed, "a sequence appears twice in a step")
            self.require(len(item.committed) > 0, "nothing to read")
            self.require((item.sampling is not None) == (item.first_position == 0), "sampling starts a sequence")
            self.require((item.prompt_tokens > 0) == (item.first_position == 0), "so does the length of its prompt")
            self.require(item.prompt is None or item.first_position == 0, "all that is known, but not at the start")
            if item.sampling is not None:
                self.held[item.sequence_id] = HeldSequence(item.sampling)
            held = self.held.get(item.sequence_id)
            if held is None or len(held.tokens) < item.first_position:
                continue
            del held.tokens[item.first_position :]
            held.tokens += [int(token) for token in item.committed]
            held.cached = self._found(item)
            if len(held.cached) > len(held.tokens):
                held.tokens = list(held.cached)
            self._remember(held.tokens)
            for position, token in enumerate(held.tokens):
                right = token < FIRST_TOY_OUTPUT or token == toy_next(held.tokens[:position], held.sampling)
                self.require(self.trusting or right, f"token {token} at position {position} was never committed")
            followed[item.sequence_id] = held
        return followed

    def _found(self, item: ProposeItem | VerifyItem) -> list[int]:
        """The longest remembered prefix of the sequence that leaves a token to read."""
        if item.prompt is None or not self.prefix_caching:
            return []
        known: list[int] = item.prompt.tolist()
        self.require(known[: len(item.committed)] == item.committed.tolist(), "what is read is not what is known")
        lengths = range(0, len(known), self.block_tokens)
        found = known[: max((length for length in lengths if tuple(known[:length]) in self.remembered), default=0)]
        self.prefix_hits += len(found)
        return found

    def _remember(self, tokens: list[int]) -> None:
        if self.prefix_caching:
            whole = range(self.block_tokens, len(tokens) + 1, self.block_tokens)
            self.remembered.update(tuple(tokens[:length]) for length in whole)

    @staticmethod
    def cached_tokens(item: ProposeItem | VerifyItem, held: HeldSequence | None) -> int | None:
        """What the answer says of it: how much is held, where that is more than was sent."""
        sent = item.first_position + len(item.committed)
        return len(held.cached) if held is not None and len(held.cached) >= sent else None

    def check_room(self) -> None:
        """Raise if the KV of the step does not fit."""
        self.require(self._blocks() <= self.total_blocks, f"{self._blocks()} blocks of {self.total_blocks}")
        for held in self.held.values():
            self.require(len(held.tokens) <= self.context_length, f"{len(held.tokens)} tokens pass the context")

    def require(self, holds: bool, otherwise: str) -> None:
        """Raise, and remember, a violation of the protocol."""
        if not holds:
            self.violations.append(otherwise)
            raise ProtocolViolation(f"{self.worker_id}: {otherwise}")

    def _blocks(self) -> int:
        return sum(-(-len(held.tokens) // self.block_tokens) for held in self.held.values())


class ScriptedTarget(ScriptedWorker):
    """Verifies with the toy model. A sequence whose prompt begins with `faulty_first_token` cannot go on.

    It says that a step took 1 ms and `token_ms` for each token, and takes as long as `delay_s` says.
    """

    faulty_first_token: int | None = None
    token_ms: float = 0.0

    def __init__(self, worker_id: str = "target-0", **options: object) -> None:
        super().__init__(worker_id, WorkerRole.TARGET, "toy", **options)  # type: ignore[arg-type]

    def answer(self, message: StepRequest, epochs_late: int) -> WorkerResponse:
        """See `workers.engine.verifier.Verifier.verify`."""
        assert isinstance(message, VerifyRequest)
        followed = self.follow(message.items)
        items = []
        for item in message.items:
            self.require(item.sample or not len(item.proposal), "drafts where nothing is drawn")
            self.require(item.sample or not item.lookup_tokens, "lookups where nothing is drawn")
            if held := followed.get(item.sequence_id):
                if item.lookup_tokens and not len(item.proposal):
                    item = replace(item, proposal=Proposal(token_ids(toy_lookup(held.tokens, item.lookup_tokens))))
                held.tokens += [int(token) for token in item.proposal.token_ids]
            items.append(item)
        self.check_room()
        verified = (self._verified(item, followed.get(item.sequence_id), epochs_late) for item in items)
        answers = [
            replace(
                answer,
                looked_up=len(item.proposal) if item.proposal is not sent.proposal else 0,
                reused_tokens=len(followed[item.sequence_id].cached) if item.sequence_id in followed else 0,
            )
            for answer, item, sent in zip(verified, items, message.items, strict=True)
        ]
        tokens = sum(len(item.committed) + len(item.proposal) for item in items)
        return VerifyResponse(tuple(answers), compute_ms=1.0 + tokens * self.token_ms, read_tokens=tokens)

    def _verified(self, item: VerifyItem, held: HeldSequence | None, epochs_late: int) -> VerifiedItem:
        epoch = item.epoch - epochs_late
        if epochs_late:
            return VerifiedItem(item.sequence_id, epoch, 0, token_ids([FIRST_TOY_OUTPUT]))
        if held is None:
            return VerifiedItem(item.sequence_id, epoch, lost=True)
        if held.tokens[0] == self.faulty_first_token:
            return VerifiedItem(item.sequence_id, epoch, fault="its logits are not finite")
        scored = self._scored(item, held)
        if not item.sample:
            return VerifiedItem(item.sequence_id, epoch, scored=scored, cached_tokens=self.cached_tokens(item, held))
        base = item.first_position + len(item.committed)
        children = self._children(item.proposal)
        del held.tokens[base:]
        node = -1
        while (own := toy_next(held.tokens, held.sampling)) in children[node]:
            held.tokens.append(own)
            node = children[node][own]
        drawn = [*held.tokens[base:], own]
        known = [*held.tokens, own]
        logprobs = None if item.logprobs is None else toy_logprobs(known, base, item.logprobs)
        accepted = len(drawn) - 1
        return VerifiedItem(item.sequence_id, epoch, accepted, token_ids(drawn), logprobs=logprobs, scored=scored)

    def _children(self, proposal: Proposal) -> dict[int, dict[int, int]]:
        """Each node's children by token; -1 is the last committed token."""
        ids = proposal.token_ids.tolist()
        parents = range(-1, len(ids) - 1) if proposal.parents is None else proposal.parents.tolist()
        self.require(len(parents) == len(ids), "a node without a parent")
        children: dict[int, dict[int, int]] = {-1: {}}
        for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
            self.require(parent in children, "a node before its parent")
            self.require(token not in children[parent], "equal siblings")
            children[parent][token] = node
            children[node] = {}
        return children

    def _scored(self, item: VerifyItem, held: HeldSequence) -> TokenLogprobs | None:
        if not len(item.scored):
            return None
        self.require(item.logprobs is not None, "scores of the prompt, but of how many tokens?")
        self.require(len(item.scored) <= len(item.committed), "tokens to score that stand behind nothing read")
        behind = item.committed[1:].tolist()
        self.require(item.scored.tolist()[: len(behind)] == behind[: len(item.scored)], "scored is not what follows")
        tokens = [*held.tokens[: item.first_position + 1], *item.scored.tolist()]
        return toy_logprobs(tokens, item.first_position + 1, item.logprobs or 0)


class SwayedTarget(ScriptedTarget):
    """A faulty target: from position `sways_at` on, what it draws behind drafts is not what it draws without them."""

    def __init__(self, sways_at: int, **options: object) -> None:
        super().__init__(trusting=True, **options)  # type: ignore[arg-type]
        self._sways_at = sways_at

    def _verified(self, item: VerifyItem, held: HeldSequence | None, epochs_late: int) -> VerifiedItem:
        verified = super()._verified(item, held, epochs_late)
        position = item.first_position + len(item.committed) + verified.accepted
        if not len(item.proposal) or position < self._sways_at:
            return verified
        own = int(verified.token_ids[-1])
        other = own + 1 if own + 1 < TOY_VOCABULARY else FIRST_TOY_OUTPUT
        return replace(verified, token_ids=token_ids([*verified.token_ids[:-1], other]))


class ScriptedDrafter(ScriptedWorker):
    """Drafts what `guess` says."""

    def __init__(self, guess: Guess = toy_next, worker_id: str = "draft-0", **options: object) -> None:
        options = {"name": "toy-draft"} | options
        super().__init__(worker_id, WorkerRole.DRAFT, **options)  # type: ignore[arg-type]
        self._guess = guess

    def answer(self, message: StepRequest, epochs_late: int) -> WorkerResponse:
        """See `workers.drafters.base.Drafter`."""
        if isinstance(message, DraftAheadRequest):
            return DraftAheadResponse(tuple(self._ahead(item) for item in message.items), compute_ms=1.0)
        assert isinstance(message, ProposeRequest)
        followed = self.follow(message.items)
        answers = []
        for item in message.items:
            held = followed.get(item.sequence_id)
            drafts: list[int] = []
            if held is not None and item.draft_tokens:
                base = len(held.tokens)
                for _ in range(item.draft_tokens):
                    held.tokens.append(self._guess(held.tokens, held.sampling))
                # The last draft is drawn and not read.
                drafts = held.tokens[base:]
                held.tokens.pop()
            proposal = Proposal(token_ids([FIRST_TOY_OUTPUT] * 9 if epochs_late else drafts))
            cached = self.cached_tokens(item, held)
            answers.append(
                ProposedItem(item.sequence_id, item.epoch - epochs_late, proposal, held is None, cached_tokens=cached)
            )
        self.check_room()
        return ProposeResponse(tuple(answers), compute_ms=1.0)

    def _ahead(self, item: DraftAheadItem) -> DraftedAheadItem:
        """Draft behind the outcomes that come to pass if the toy target draws them, likeliest first by assumption."""
        held = self.held.get(item.sequence_id)
        if held is None or len(held.tokens) < item.first_position:
            return DraftedAheadItem(item.sequence_id, item.epoch, lost=True)
        self.require(len(item.committed) > 0, "nothing committed to draft behind")
        del held.tokens[item.first_position :]
        held.tokens += item.committed.tolist()
        base = len(held.tokens)
        held.tokens += item.drafts.tolist()
        self.check_room()
        branches = []
        # That its very first draft is wrong it never considers.
        for accepted in range(len(item.drafts), min(1, len(item.drafts)) - 1, -1)[: item.branches]:
            tokens = held.tokens[: base + accepted]
            tokens.append(toy_next(tokens, held.sampling))
            drafts = [tokens[-1]]
            begins_late = item.branches == 1 or accepted == len(item.drafts)
            steps = item.draft_tokens + 1 if item.steps is None else item.steps
            for _ in range(min(item.draft_tokens, steps - begins_late)):
                drafts.append(self._guess([*tokens[:-1], *drafts], held.sampling))
            branches.append(Branch(accepted, drafts[0], Proposal(token_ids(drafts[1:])), 1.0))
        return DraftedAheadItem(item.sequence_id, item.epoch, tuple(branches))
