"""Drafts that the target looks up itself, with a real tiny model: the ids are those of plain decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.test_tree_rounds import SAMPLINGS, Decoded
from tests.engine.tiny_models import CONTEXT
from workers.decoding.prompt_lookup import look_up
from workers.engine import verifier as verifier_module
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    NO_PROPOSAL,
    LogitRules,
    Proposal,
    SamplingParams,
    TokenIds,
    VerifiedItem,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

LoadEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0)
REPETITIVE = [11, 12, 13, 14, 15, 16] * 5
TOKENS = 40


def decode(
    engine: Engine, samplings: Sequence[SamplingParams], lookup_tokens: int, **options: Any
) -> tuple[list[list[int]], list[VerifiedItem]]:
    """Decode a sequence per sampling, together; return what each gave, and all answers."""
    verifier, answers = Verifier(engine), []
    sequences = [Decoded(number, sampling, chunk=7) for number, sampling in enumerate(samplings)]
    for sequence in sequences:
        sequence.prompt, sequence.tokens = list(REPETITIVE), list(REPETITIVE)
    while going := [each for each in sequences if len(each.tokens) < len(each.prompt) + TOKENS]:
        items = [replace(each.item(NO_PROPOSAL), lookup_tokens=lookup_tokens, **options) for each in going]
        response = verifier.verify(VerifyRequest(tuple(items)))
        looked_up = sum(answer.looked_up for answer in response.items)
        assert response.read_tokens == sum(len(item.committed) for item in items) + looked_up
        for sequence, item, answer in zip(going, items, response.items, strict=True):
            assert answer.accepted <= answer.looked_up <= lookup_tokens
            assert item.sample or not answer.looked_up
            sequence.apply(item, answer)
        answers += response.items
    verifier.release(None)
    assert engine.free_blocks == engine.total_blocks
    return [each.tokens[len(each.prompt) :][:TOKENS] for each in sequences], answers


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("lookup_tokens", [1, 8])
def test_no_lookup_changes_the_ids(load_engine: LoadEngine, lookup_tokens: int, prefix_caching: bool) -> None:
    engine = load_engine(prefix_caching=prefix_caching)
    plain, none = decode(engine, SAMPLINGS, 0)
    ids, answers = decode(engine, SAMPLINGS, lookup_tokens)
    assert ids == plain
    assert not any(answer.looked_up for answer in none)
    assert sum(answer.accepted for answer in answers) > 0
    assert len(answers) < len(none)


def test_text_that_repeats_itself_takes_few_verifications(load_engine: LoadEngine) -> None:
    monotonous = replace(SamplingParams(temperature=1.0, seed=5), rules=LogitRules(logit_bias=((9, 99.0),)))
    ids, answers = decode(load_engine(), [monotonous], 8)
    drawn = [answer for answer in answers if len(answer.token_ids)]
    assert ids == [[9] * TOKENS]
    # Three of the token must be there before two of them recur.
    assert all(answer.accepted == answer.looked_up == 8 for answer in drawn[3:]) and len(drawn) <= 3 + 5


def test_log_probabilities_are_reported_for_what_was_looked_up(load_engine: LoadEngine) -> None:
    _, answers = decode(load_engine(), [GREEDY], 8, logprobs=2)
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs.chosen if answer.logprobs else ())


def test_a_proposal_that_comes_with_the_item_is_verified_instead(load_engine: LoadEngine) -> None:
    verifier = Verifier(load_engine())
    item = VerifyItem(1, 0, 0, token_ids(REPETITIVE), Proposal(token_ids([3])), True, GREEDY, 30, lookup_tokens=8)
    response = verifier.verify(VerifyRequest((item,)))
    assert response.items[0].looked_up == 0 and response.read_tokens == len(REPETITIVE) + 1


def test_drafts_do_not_pass_the_context(load_engine: LoadEngine) -> None:
    tokens = (REPETITIVE * 10)[: CONTEXT - 2]
    item = VerifyItem(1, 0, 0, token_ids(tokens), sampling=GREEDY, prompt_tokens=len(tokens), lookup_tokens=8)
    assert Verifier(load_engine()).verify(VerifyRequest((item,))).items[0].looked_up == 2


def test_history_is_the_sequences_own_after_a_rollback(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is searched is what is committed: rejected drafts are not in it."""
    searched: list[list[int]] = []

    def noted(tokens: TokenIds, most: int) -> TokenIds:
        searched.append(tokens.tolist())
        return look_up(tokens, most)

    monkeypatch.setattr(verifier_module, "look_up", noted)
    ids, _ = decode(load_engine(), [SamplingParams(temperature=1.0, seed=3)], 8)
    whole = np.array(REPETITIVE + ids[0])
    for tokens in searched:
        shared = min(len(tokens), len(whole))
        assert tokens[:shared] == whole[:shared].tolist()
