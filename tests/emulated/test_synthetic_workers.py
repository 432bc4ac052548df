"""Synthetic workers keep a real worker's accounts, refuse what a real one could not follow, and branch consistently."""

from dataclasses import replace

import numpy as np
import pytest

from tests.emulated.workers import LANGUAGE, PROMPT, SAMPLING, SIZE, draft_ahead, drafter, propose, target, verify
from workers.emulated.language import synthetic_text
from workers.errors import OutOfBlocksError
from workers.messages import (
    DraftAheadItem,
    DraftAheadRequest,
    LogitRules,
    Proposal,
    ReleaseRequest,
    SamplingParams,
    StatsRequest,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

TEXT = synthetic_text(LANGUAGE, PROMPT, SAMPLING, 200)


def test_a_target_accepts_the_right_drafts_and_corrects_the_first_wrong_one() -> None:
    worker = target()
    verified = verify(worker, 0, PROMPT, [*TEXT[:2], TEXT[2] + 1, TEXT[3]])
    assert (verified.accepted, verified.token_ids.tolist(), verified.epoch) == (2, TEXT[:3], 3)
    verified = verify(worker, 7, [TEXT[2]], TEXT[3:6])
    assert (verified.accepted, verified.token_ids.tolist()) == (3, TEXT[3:7])


def test_a_target_holds_blocks_for_what_it_accepted_and_gives_them_back() -> None:
    worker = target()
    verify(worker, 0, PROMPT, [*TEXT[:1], *[64] * 10])
    # 5 of the prompt and one accepted draft, in blocks of 4.
    assert worker.stats().free_blocks == SIZE.total_blocks - 2
    worker.release((1,))
    assert (worker.stats().sequences, worker.stats().free_blocks) == (0, SIZE.total_blocks)


def test_a_prompt_chunk_is_only_read() -> None:
    worker = target()
    assert len(verify(worker, 0, PROMPT[:3], sample=False).token_ids) == 0
    assert verify(worker, 3, PROMPT[3:]).token_ids.tolist() == TEXT[:1]


def test_what_is_unknown_or_too_short_is_lost_and_stays_as_it_was() -> None:
    worker = target()
    assert verify(worker, 5, TEXT[:1]).lost
    verify(worker, 0, PROMPT)
    assert verify(worker, 6, TEXT[1:2]).lost
    assert not verify(worker, 5, TEXT[:1]).lost
    assert propose(drafter(), 5, TEXT[:1], 2).lost


def test_a_step_without_room_changes_nothing() -> None:
    worker = target(replace(SIZE, total_blocks=3))
    verify(worker, 0, PROMPT)
    with pytest.raises(OutOfBlocksError, match="needs 2 more KV blocks, 1 are free"):
        verify(worker, 5, TEXT[:1], [64] * 10)
    assert worker.stats().free_blocks == 1
    assert verify(worker, 5, TEXT[:1], TEXT[1:3]).accepted == 2


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (VerifyItem(1, 0, 0, token_ids(PROMPT)), "sampling is set"),
        (VerifyItem(1, 0, 5, token_ids(TEXT[:1]), sampling=SAMPLING), "sampling is set"),
        (VerifyItem(1, 0, 5, token_ids([])), "no new tokens"),
        (VerifyItem(1, 0, -1, token_ids(TEXT[:1])), "first_position is -1"),
        (VerifyItem(1, 0, 5, token_ids([TEXT[0] + 1])), "never drawn"),
        (VerifyItem(1, 0, 5, token_ids([1_000])), "not in the vocabulary"),
        (VerifyItem(1, 0, 5, token_ids(TEXT[:1]), Proposal(token_ids(TEXT[1:20]))), "exceed the context 16"),
        (VerifyItem(1, 0, 5, token_ids(TEXT[:1]), Proposal(token_ids([64])), sample=False), "nothing is drawn"),
        (VerifyItem(1, 0, 5, token_ids(TEXT[:1]), Proposal(token_ids([64]), token_ids([-1]))), "no trees"),
    ],
)
def test_a_message_that_no_router_may_send_is_refused(item: VerifyItem, reason: str) -> None:
    worker = target(replace(SIZE, context_length=16))
    verify(worker, 0, PROMPT)
    with pytest.raises(ValueError, match=reason):
        worker.verify(VerifyRequest((item,)))


def test_a_sequence_appears_once_in_a_step() -> None:
    worker = target()
    verify(worker, 0, PROMPT)
    item = VerifyItem(1, 0, 5, token_ids(TEXT[:1]))
    with pytest.raises(ValueError, match="appears twice"):
        worker.verify(VerifyRequest((item, item)))


def test_what_takes_logits_is_a_fault() -> None:
    assert "rules" in (verify(target(), 0, PROMPT, sampling=SamplingParams(rules=LogitRules())).fault or "")
    assert "probabilities" in (verify(target(), 0, PROMPT, logprobs=0).fault or "")


def test_a_drafter_drafts_the_text_and_holds_all_but_its_last_draft() -> None:
    worker = drafter(rates=(1.0,))
    assert propose(worker, 0, PROMPT, 6).proposal.token_ids.tolist() == TEXT[:6]
    # The sixth draft was not read: 10 tokens are held.
    assert propose(worker, 11, TEXT[6:7], 1).lost
    assert not propose(worker, 10, TEXT[5:7], 1).lost


def test_behind_a_wrong_draft_all_others_are_wrong() -> None:
    worker = drafter(rates=(0.6,))
    wrong_chains = 0
    for length in range(len(PROMPT), len(PROMPT) + 100):
        committed = [*PROMPT, *TEXT[: length - len(PROMPT)]]
        drafts = propose(worker, 0, committed, 6).proposal.token_ids.tolist()
        right = [a == b for a, b in zip(drafts, TEXT[length - len(PROMPT) :], strict=False)]
        first_wrong = right.index(False) if False in right else 6
        assert sum(right[first_wrong:]) == 0
        wrong_chains += first_wrong < 6
    assert wrong_chains > 80


def test_a_chain_ends_where_its_confidence_does_but_not_before_the_first_draft() -> None:
    worker = drafter(rates=(0.5,))
    whole = propose(worker, 0, PROMPT, 12).proposal
    assert whole.confidence is not None
    chances = np.cumprod(whole.confidence)
    for least in (0.05, 0.2, 1.0):
        cut = propose(worker, 0, PROMPT, 12, least_confidence=least).proposal
        assert len(cut) == max(1, int((chances >= least).sum()))
        assert cut.token_ids.tolist() == whole.token_ids[: len(cut)].tolist()


def test_a_chain_ends_where_the_context_does() -> None:
    worker = drafter(replace(SIZE, context_length=8), rates=(1.0,))
    assert len(propose(worker, 0, PROMPT, 6).proposal) == 4
    assert not propose(worker, 0, [*PROMPT, *TEXT[:6]], 6).lost


def test_branches_are_what_would_be_proposed_behind_their_outcome() -> None:
    ahead, plain = drafter(rates=(0.6,)), drafter(rates=(0.6,))
    length, chain = len(PROMPT), propose(ahead, 0, PROMPT, 4).proposal.token_ids.tolist()
    branches = draft_ahead(ahead, length - 1, PROMPT[-1:], chain)
    assert len({(branch.accepted, branch.token_id) for branch in branches}) == len(branches)
    assert [branch.probability for branch in branches] == sorted((b.probability for b in branches), reverse=True)
    probabilities = sum(branch.probability for branch in branches)
    assert 0.5 < probabilities <= 1
    verified = 0
    for branch in branches:
        outcome = [*chain[: branch.accepted], branch.token_id]
        if outcome == TEXT[: len(outcome)]:  # the one that comes true can be committed, and proposed behind
            expected = propose(plain, 0, [*PROMPT, *outcome], 3).proposal
            assert branch.proposal.token_ids.tolist() == expected.token_ids.tolist()
            assert branch.proposal.confidence == pytest.approx(expected.confidence)
            verified += 1
        assert branch.accepted == 4 or branch.token_id != chain[branch.accepted]
    assert verified <= 1


def test_outcomes_come_as_often_as_their_branches_say() -> None:
    worker, verifier = drafter(rates=(0.6,)), target()
    hits, expected, rounds, length = 0, 0.0, 0, len(PROMPT)
    history = list(PROMPT)
    while rounds < 400:
        chain = propose(worker, 0, history, 3).proposal.token_ids.tolist()
        branches = draft_ahead(worker, length - 1, history[-1:], chain, branches=4)
        assert len(branches) <= 4
        verified = verify(verifier, 0, history, chain)
        outcome = (verified.accepted, int(verified.token_ids[-1]))
        hits += outcome in [(branch.accepted, branch.token_id) for branch in branches]
        expected += sum(branch.probability for branch in branches)
        history += verified.token_ids.tolist()
        length, rounds = len(history), rounds + 1
    assert abs(hits - expected) <= 4 * np.sqrt(rounds) / 2
    assert 0.5 < hits / rounds < 0.95


def test_drafting_ahead_reads_commits_and_drafts_and_loses_what_is_unknown() -> None:
    worker = drafter(rates=(1.0,))
    chain = propose(worker, 0, PROMPT, 4).proposal.token_ids.tolist()
    draft_ahead(worker, 4, PROMPT[-1:], chain)
    assert not propose(worker, 9, TEXT[4:5], 1).lost
    unknown = DraftAheadItem(2, 3, 4, token_ids([1]), token_ids([2]), 1, 1)
    assert worker.draft_ahead(DraftAheadRequest((unknown,))).items[0].lost


def test_workers_answer_the_messages_that_are_theirs() -> None:
    from workers.answering import answer

    worker = target()
    verify(worker, 0, PROMPT)
    assert answer(worker, ReleaseRequest(None)) is None
    assert answer(worker, StatsRequest()) == worker.stats()
    with pytest.raises(TypeError, match="SyntheticDrafter does not answer VerifyRequest"):
        answer(drafter(), VerifyRequest(()))
    with pytest.raises(TypeError, match="SyntheticTarget does not answer DraftAheadRequest"):
        answer(worker, DraftAheadRequest(()))
