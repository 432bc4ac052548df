"""Trees in rounds: the text is the target's own, counts are right, and what no target can verify reaches none."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import (
    Guess,
    HeldSequence,
    ScriptedDrafter,
    ScriptedTarget,
    Trouble,
    never_right,
    sometimes_right,
    toy_next,
)
from tests.fakes.trees import ScriptedTreeDrafter
from tests.router.helpers import (
    ask,
    ask_all,
    assert_nothing_is_left,
    in_service,
    plainly,
    request,
    run,
    serving,
    supervised,
    until,
)
from workers.log_lines import FewOfAKind
from workers.messages import FinishReason, Proposal, SparseProbabilities, VerifyRequest, token_ids
from workers.router import rounds
from workers.router.rounds import proposal_fault

guesses = st.sampled_from([toy_next, never_right, sometimes_right(30), sometimes_right(70)])
troubles = st.dictionaries(st.integers(0, 12), st.sampled_from(Trouble), max_size=3)


@given(
    mixed=st.lists(guesses, min_size=1, max_size=4),
    k=st.integers(0, 9),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=6),
    drafter_troubles=troubles,
    chunk=st.sampled_from([3, 512]),
    drafter_context=st.sampled_from([8, 30, 256]),
    blocks=st.sampled_from([18, 60, 4096]),
)
@settings(max_examples=60)
def test_the_text_is_that_of_plain_decoding_whatever_trees_are_drafted(
    mixed: list[Guess],
    k: int,
    shapes: list[tuple[int, int]],
    drafter_troubles: dict[int, Trouble],
    chunk: int,
    drafter_context: int,
    blocks: int,
) -> None:
    asked = [
        request(length, max_tokens, number, drafter=["toy-trees", "toy-draft"][number % 3 == 2])
        for number, (length, max_tokens) in enumerate(shapes)
    ]
    target = ScriptedTarget(total_blocks=blocks)
    trees = ScriptedTreeDrafter(*mixed, troubles=drafter_troubles, context_length=drafter_context)
    chains = ScriptedDrafter(mixed[0], worker_id="draft-1")

    async def test() -> None:
        async with (
            serving(target, trees, chains, max_draft_tokens=k, prefill_chunk_tokens=chunk) as router,
            supervised(router, trees),
        ):
            for each, answer in zip(asked, await ask_all(router, asked), strict=True):
                assert answer.failure is None
                assert answer.tokens == plainly(each)
                assert answer.finish_reason is FinishReason.LENGTH
                usage = answer.usage
                assert usage.committed_tokens == each.stop.max_tokens
                assert usage.accepted_tokens == sum(usage.accepted_per_position) <= usage.draft_tokens
                assert usage.draft_tokens <= usage.verifications * k
                assert list(usage.accepted_per_position) == sorted(usage.accepted_per_position, reverse=True)
            await until(lambda: "draft-0" in in_service(router))
            await assert_nothing_is_left(router, target, trees, chains)

    run(test)


def test_a_tree_that_holds_the_right_path_commits_all_of_it_and_counts_its_nodes_and_depths() -> None:
    # Two guesses of which one is right: of 6 nodes, half are on the path.
    asked = request(max_tokens=17)
    target, trees = ScriptedTarget(), ScriptedTreeDrafter(never_right, toy_next)

    async def test() -> None:
        async with serving(target, trees, max_draft_tokens=6) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            usage = answer.usage
            # Three rounds commit 4 tokens each. Then the budget allows 4 nodes, 1 node (the wrong guess) and none.
            assert (usage.verifications, usage.accepted_tokens, usage.draft_tokens) == (6, 11, 23)
            assert usage.accepted_per_position == (4, 4, 3)
            assert (await router.status()).totals.draft_tokens == 23
            await assert_nothing_is_left(router, target, trees)

    run(test)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_a_tree_never_has_more_nodes_than_the_budget_holds(max_tokens: int) -> None:
    asked = request(length=6, max_tokens=max_tokens)
    # Blocks of one token: the target's KV is exactly what the request may fill.
    target = ScriptedTarget(block_tokens=1, total_blocks=6 + max_tokens)
    trees = ScriptedTreeDrafter(never_right, sometimes_right(50), toy_next)

    async def test() -> None:
        async with serving(target, trees, max_draft_tokens=8) as router:
            assert (await ask(router, asked)).tokens == plainly(asked)
            await assert_nothing_is_left(router, target, trees)

    run(test)


def test_a_drafter_of_trees_is_asked_to_read_again_what_it_may_not_hold_and_never_loses_a_sequence() -> None:
    asked = request(max_tokens=40)
    target, trees = ScriptedTarget(), ScriptedTreeDrafter(sometimes_right(60), never_right)

    async def test() -> int:
        async with serving(target, trees, max_draft_tokens=5) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            return answer.usage.verifications

    verifications = run(test)
    # A loss would cost a round without drafts; only the last round, if one token is left, needs none.
    assert len(trees.proposals) >= verifications - 1


def proposal(ids: list[int], parents: list[int] | None = None, q: list[list[float]] | None = None) -> Proposal:
    """A proposal; the rows of `q` are over the ids 16 and 17."""
    sparse = None
    if q is not None:
        sparse = SparseProbabilities(np.array([[16, 17]] * len(q), dtype=np.int32), np.array(q, dtype=np.float32))
    return Proposal(token_ids(ids), None if parents is None else token_ids(parents), sparse)


WRONG = {
    "more nodes than asked for": proposal([16, 17, 18, 19, 20], [-1, -1, -1, -1, -1]),
    "too many in a chain": proposal([16, 17, 18, 19, 20]),
    "a parent that comes later": proposal([16, 17], [1, -1]),
    "a parent that is not there": proposal([16, 17], [-1, 5]),
    "its own parent": proposal([16], [0]),
    "a parent below -1": proposal([16], [-2]),
    "equal siblings": proposal([16, 17, 16], [-1, 0, -1]),
    "fewer parents than nodes": proposal([16, 17], [-1]),
    "a tree with a q": proposal([16], [-1], [[0.5, 0.5]]),
    "fewer rows of q than drafts": proposal([16, 17], q=[[0.5, 0.5]]),
    "a draft that is not in its q": proposal([16, 18], q=[[0.5, 0.5], [0.5, 0.5]]),
    "a draft to which q gives nothing": proposal([16], q=[[0.0, 1.0]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_proposal_that_cannot_be_verified_is_dropped_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds.logger, "filters", [FewOfAKind()])

    class WrongDrafter(ScriptedTreeDrafter):
        def propose(self, held: HeldSequence, draft_tokens: int) -> Proposal:
            return WRONG[name]

    asked = request(max_tokens=12)
    target, drafter = ScriptedTarget(), WrongDrafter()

    async def test() -> None:
        async with serving(target, drafter, max_draft_tokens=4) as router:
            answer = await ask(router, asked)
            assert answer.tokens == plainly(asked)
            assert (answer.usage.draft_tokens, answer.usage.verifications) == (0, 12)
            await assert_nothing_is_left(router, target, drafter)

    with caplog.at_level(logging.WARNING):
        run(test)

    assert "a proposal of draft-0 is dropped" in caplog.text
    assert max(map(caplog.messages.count, caplog.messages)) <= 5
    verified = [item for message in target.messages if isinstance(message, VerifyRequest) for item in message.items]
    assert all(len(item.proposal) == 0 for item in verified)


@given(st.lists(st.integers(-1, 6), max_size=6), st.integers(0, 7))
@settings(max_examples=80)
def test_only_trees_within_the_budget_whose_parents_come_first_have_no_fault(parents: list[int], asked: int) -> None:
    tree = proposal(list(range(len(parents))), parents)
    valid = len(parents) <= asked and all(parent < node for node, parent in enumerate(parents))
    assert (proposal_fault(tree, asked) is None) is valid
