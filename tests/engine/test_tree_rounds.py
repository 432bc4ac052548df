"""Rounds of trees with real tiny models: whatever tree is proposed, the ids are those of plain decoding."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny_models import VOCABULARY, TinyModel
from workers.decoding.sampling import PositionRun
from workers.engine import tree_rounds
from workers.engine.engine import Engine
from workers.engine.followed import FollowedSequences
from workers.engine.item_rows import ItemRows
from workers.engine.kv_pool import KVPool
from workers.engine.verifier import Verifier
from workers.messages import (
    NO_PROPOSAL,
    LogitRules,
    Proposal,
    SamplingParams,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

LoadEngine = Callable[..., Engine]
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=11)
PENALTIES = LogitRules(repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=1.1)
BAD_WORDS = ((8,), *((first, 95 - first) for first in range(96)), *((a, (a * 5) % 96, 40) for a in range(96)))
SAMPLINGS = [
    GREEDY,
    SAMPLED,
    replace(GREEDY, rules=PENALTIES),
    replace(SAMPLED, rules=PENALTIES),
    replace(SAMPLED, rules=LogitRules(bad_words=BAD_WORDS)),
    SamplingParams(0.7, 12, 0.9, 2**63 - 1, rules=LogitRules(4, (5, 7, 11), ((3, 2.0),), 1.8, 0.4, -0.6, BAD_WORDS)),
]
PROMPTS = [[(7 * index + 3 * position) % 90 + 3 for position in range(3 + 5 * index)] for index in range(6)]
TOKENS = 30


class Decoded:
    """One sequence as a router would drive it: what is committed, and what the target's KV holds."""

    def __init__(self, number: int, sampling: SamplingParams, chunk: int = 512) -> None:
        self.number, self.sampling, self.chunk = number, sampling, chunk
        self.prompt = PROMPTS[number % len(PROMPTS)]
        self.tokens = list(self.prompt)
        self.cached = 0
        self.epoch = 0
        self.accepted = self.deepest = 0

    @property
    def draws(self) -> bool:
        """Whether the next step reads up to the last committed token."""
        return self.cached + self.chunk >= len(self.tokens)

    def item(self, proposal: Proposal) -> VerifyItem:
        """The next step's part of this sequence; a prompt is read in chunks first."""
        start = self.cached == 0
        return VerifyItem(
            self.number,
            self.epoch,
            self.cached,
            token_ids(self.tokens[self.cached : self.cached + self.chunk]),
            proposal if self.draws else NO_PROPOSAL,
            sample=self.draws,
            sampling=self.sampling if start else None,
            prompt_tokens=len(self.prompt) if start else 0,
        )

    def apply(self, item: VerifyItem, answer: VerifiedItem) -> None:
        """Commit what was verified."""
        assert answer.fault is None and not answer.lost and answer.epoch == self.epoch
        self.epoch += 1
        if not item.sample:
            self.cached += len(item.committed)
            return
        assert len(answer.token_ids) == answer.accepted + 1
        self.cached = len(self.tokens) + answer.accepted
        self.tokens += answer.token_ids.tolist()
        self.accepted += answer.accepted
        self.deepest = max(self.deepest, answer.accepted)


Propose = Callable[[Decoded], Proposal]


def decode(engine: Engine, sequences: Sequence[Decoded], propose: Propose, tokens: int = TOKENS) -> list[list[int]]:
    """Run rounds over all `sequences` until each has at least `tokens` new ones; return the first `tokens` of each."""
    verifier = Verifier(engine)
    while running := [each for each in sequences if len(each.tokens) < len(each.prompt) + tokens]:
        items = [each.item(propose(each)) for each in running]
        for each, item, answer in zip(running, items, verifier.verify(VerifyRequest(tuple(items))).items, strict=True):
            each.apply(item, answer)
            assert engine.length(each.number) == each.cached
    held = sum(-(-each.cached // engine.block_tokens) for each in sequences)
    assert engine.free_blocks == engine.total_blocks - held
    verifier.release(None)
    assert engine.free_blocks == engine.total_blocks
    return [each.tokens[len(each.prompt) :][:tokens] for each in sequences]


def plainly(engine: Engine, samplings: Sequence[SamplingParams], tokens: int = TOKENS) -> list[list[int]]:
    """What decoding without proposals gives, one sequence after the other."""
    sequences = [Decoded(number, sampling) for number, sampling in enumerate(samplings)]
    return [decode(engine, [each], lambda _: NO_PROPOSAL, tokens)[0] for each in sequences]


def random_tree(rng: random.Random, right: Sequence[int], nodes: int) -> Proposal:
    """A random tree that has the tokens to come, `right`, on one of its paths now and then, in any order of nodes."""
    ids: list[int] = []
    parents: list[int] = []
    true_path = [-1]  # nodes of which each is right
    for node in range(nodes):
        parent = rng.choice([-1, *range(node), true_path[-1], true_path[-1]])
        siblings = {ids[other] for other in range(node) if parents[other] == parent}
        depth = len(true_path) - 1
        on_path = parent == true_path[-1] and depth < len(right) and rng.random() < 0.6
        token = right[depth] if on_path else rng.randrange(3, VOCABULARY)
        while token in siblings:
            token = rng.randrange(3, VOCABULARY)
        if parent == true_path[-1] and depth < len(right) and token == right[depth]:
            true_path.append(node)
        ids.append(token)
        parents.append(parent)
    return Proposal(token_ids(ids), token_ids(parents))


def guessing(rng: random.Random, plain: Sequence[Sequence[int]], nodes: int, chains: bool = False) -> Propose:
    """Propose trees around what plain decoding will give; with `chains`, chains for every second sequence."""

    def propose(sequence: Decoded) -> Proposal:
        right = plain[sequence.number][len(sequence.tokens) - len(sequence.prompt) :]
        if chains and sequence.number % 2:
            count = rng.randrange(nodes + 1)
            return Proposal(token_ids([token if rng.random() < 0.8 else 3 for token in right[:count]]))
        return random_tree(rng, right, rng.randrange(nodes + 1))

    return propose


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "gpt2"])
def test_no_tree_changes_the_ids(family: str, tiny_model: Callable[[str], TinyModel], load_engine: LoadEngine) -> None:
    engine = load_engine(tiny_model(family).folder)
    plain = plainly(engine, SAMPLINGS)
    deepest: list[int] = []

    @given(seed=st.integers(0, 2**32), nodes=st.integers(1, 12), chunk=st.sampled_from([5, 512]), chains=st.booleans())
    @settings(max_examples=20)
    def check(seed: int, nodes: int, chunk: int, chains: bool) -> None:
        sequences = [Decoded(number, sampling, chunk) for number, sampling in enumerate(SAMPLINGS)]
        assert decode(engine, sequences, guessing(random.Random(seed), plain, nodes, chains)) == plain
        deepest.extend(each.deepest for each in sequences)

    check()
    assert max(deepest) >= 3


def test_every_order_of_the_nodes_of_a_tree_gives_the_same(load_engine: LoadEngine) -> None:
    engine = load_engine()
    samplings = SAMPLINGS[2:5]
    plain = plainly(engine, samplings)

    def spines(sequence: Decoded) -> Proposal:
        # The right path is at the even nodes, so that all of it but its first node is moved.
        right = plain[sequence.number][len(sequence.tokens) - len(sequence.prompt) :][:4]
        ids = [token for each in right for token in (each, (each + 1) % VOCABULARY)]
        return Proposal(token_ids(ids), token_ids([max(node - node % 2 - 2, -1) for node in range(len(ids))]))

    sequences = [Decoded(number, sampling) for number, sampling in enumerate(samplings)]
    assert decode(engine, sequences, spines) == plain
    assert all(each.deepest == 4 and each.accepted == TOKENS * 4 // 5 for each in sequences)


# --- faults that the tests above must see ---------------------------------------------------------------------


def no_copy(self: KVPool, sources: object, targets: object) -> None:
    """The fault of leaving the accepted path where it was."""


def history_in_storage_order(
    followed: FollowedSequences, part: ItemRows, right: Callable[..., list[PositionRun]] = tree_rounds.runs_of
) -> list[PositionRun]:
    """The fault of taking the nodes that stand before a node for its history, whatever branch they are on."""
    read = token_ids([*followed._sequences[part.item.sequence_id].history.tokens])
    return [replace(run, context=run.context and replace(run.context, tokens=read)) for run in right(followed, part)]


def test_a_path_that_is_not_copied_would_be_seen(load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine()
    plain = plainly(engine, SAMPLINGS)
    monkeypatch.setattr(KVPool, "move_", no_copy)
    sequences = [Decoded(number, sampling) for number, sampling in enumerate(SAMPLINGS)]
    assert decode(engine, sequences, guessing(random.Random(1), plain, 8)) != plain


def test_a_history_of_storage_order_would_be_seen(load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine()
    plain = plainly(engine, SAMPLINGS)
    monkeypatch.setattr("workers.engine.verifier.runs_of", history_in_storage_order)
    sequences = [Decoded(number, sampling) for number, sampling in enumerate(SAMPLINGS)]
    assert decode(engine, sequences, guessing(random.Random(1), plain, 8)) != plain


def test_options_that_leave_nothing_on_the_path_end_the_sequence_and_off_it_they_do_not_matter(
    load_engine: LoadEngine,
) -> None:
    engine = load_engine()
    first = plainly(engine, [GREEDY], 1)[0][0]
    other = first + 1 if first + 1 < VOCABULARY else first - 1
    tree = Proposal(token_ids([other, first, 4]), token_ids([-1, -1, 1]))

    def verified(dead_end: int) -> VerifiedItem:
        """What comes of `tree` where nothing can follow `dead_end`."""
        rules = LogitRules(bad_words=tuple((dead_end, second) for second in range(VOCABULARY)))
        verifier = Verifier(engine)
        item = Decoded(0, replace(GREEDY, rules=rules)).item(tree)
        answer = verifier.verify(VerifyRequest((item,))).items[0]
        verifier.release(None)
        return answer

    assert verified(first).fault is not None
    spared = verified(other)
    assert spared.fault is None and spared.accepted >= 1 and spared.token_ids[0] == first
    assert engine.free_blocks == engine.total_blocks
