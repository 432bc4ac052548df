"""Drafting ahead with real tiny models: branches are what would have been proposed, and forks leave nothing behind."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.engine.test_tree_rounds import PROMPTS, SAMPLINGS
from tests.engine.tiny_models import CONTEXT, VOCABULARY, TinyModel, save_model
from tests.engine.whole_rounds import noisy_copy
from tests.fakes import byte_tokenizer
from workers.drafters.model_drafter import ModelDrafter
from workers.engine.engine import Engine
from workers.engine.verifier import Verifier
from workers.messages import (
    Branch,
    DraftAheadItem,
    DraftAheadRequest,
    DraftedAheadItem,
    Grammar,
    GrammarKind,
    LogitRules,
    Proposal,
    ProposedItem,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    Verification,
    VerifyItem,
    VerifyRequest,
    token_ids,
)

LoadEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0)
K, BRANCHES, TOKENS = 3, 5, 24


@pytest.fixture(scope="module")
def noisy(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tiny_llama, tmp_path_factory.mktemp("ahead") / "noisy", 0.05)


@dataclass
class Driven:
    """One sequence as a router drives it: what is committed, and how much of it each worker was told."""

    number: int
    sampling: SamplingParams
    tokens: list[int]
    told: int = 0
    verified: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(PROMPTS[self.number % 6])

    def start(self, position: int) -> dict[str, object]:
        """What else a message says that begins at `position`."""
        return {} if position else {"sampling": self.sampling, "prompt_tokens": self.prompt_tokens}

    def propose_item(self, k: int = K, extra: list[int] | None = None, **options: object) -> ProposeItem:
        new = token_ids(self.tokens[self.told :] + (extra or []))
        return ProposeItem(self.number, 0, self.told, new, k, **self.start(self.told), **options)  # type: ignore[arg-type]

    def ahead_item(self, drafts: list[int], branches: int = BRANCHES, k: int = K) -> DraftAheadItem:
        new = token_ids(self.tokens[self.told :])
        return DraftAheadItem(self.number, 0, self.told, new, token_ids(drafts), k, branches)


def sequences(samplings: list[SamplingParams]) -> list[Driven]:
    return [Driven(n, replace(each, choice=n), list(PROMPTS[n % 6])) for n, each in enumerate(samplings)]


def propose(drafter: ModelDrafter, *items: ProposeItem) -> list[ProposedItem]:
    return list(drafter.propose(ProposeRequest(items)).items)


def ahead(drafter: ModelDrafter, *items: DraftAheadItem) -> list[DraftedAheadItem]:
    return list(drafter.draft_ahead(DraftAheadRequest(items)).items)


def verify(verifier: Verifier, driven: Driven, drafts: list[int]) -> tuple[int, int]:
    """Let the target verify; return how many drafts were accepted and the token that followed."""
    new = token_ids(driven.tokens[driven.verified :])
    item = VerifyItem(
        driven.number,
        0,
        driven.verified,
        new,
        Proposal(token_ids(drafts)),
        **driven.start(driven.verified),  # type: ignore[arg-type]
    )
    answer = verifier.verify(VerifyRequest((item,))).items[0]
    driven.verified = len(driven.tokens) + answer.accepted
    return answer.accepted, int(answer.token_ids[-1])


def asked_afresh(fresh: ModelDrafter, driven: Driven, drafts: list[int], branch: Branch, k: int = K) -> list[int]:
    """What a drafter that knows nothing proposes if the branch comes true."""
    text = driven.tokens + drafts[: branch.accepted] + [branch.token_id]
    item = ProposeItem(900, 0, 0, token_ids(text), k, driven.sampling, driven.prompt_tokens)
    return list(propose(fresh, item)[0].proposal.token_ids.tolist())


def all_back(engine: Engine, drafter: ModelDrafter) -> bool:
    drafter.release(None)
    return engine.free_blocks == engine.total_blocks and engine.sequences == 0 and not engine._sequences


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_branches_are_what_would_have_been_proposed_and_a_hit_changes_no_proposal(
    load_engine: LoadEngine, noisy: Path, prefix_caching: bool
) -> None:
    """Cohorts whose rounds differ at random: hits that are used, hits that are not, drafts of somebody else."""
    engine = load_engine(noisy, prefix_caching=prefix_caching, block_tokens=4)
    drafter, plain = ModelDrafter(engine), ModelDrafter(load_engine(noisy, block_tokens=4))
    fresh, verifier = ModelDrafter(load_engine(noisy, prefix_caching=False)), Verifier(load_engine())
    rng = random.Random(5)
    cohort = sequences(SAMPLINGS)
    proposals = [
        list(each.proposal.token_ids.tolist()) for each in propose(drafter, *[s.propose_item() for s in cohort])
    ]
    for each in cohort:
        each.told = len(each.tokens)
    hits = corrections = 0
    while any(len(each.tokens) < len(PROMPTS[each.number % 6]) + TOKENS for each in cohort):
        for index, proposal in enumerate(proposals):
            if rng.random() < 0.15:
                proposals[index] = [*proposal[: rng.randrange(3)], rng.randrange(VOCABULARY)]
        answers = ahead(drafter, *[s.ahead_item(p) for s, p in zip(cohort, proposals, strict=True)])
        missed: list[int] = []
        for index, (driven, drafts, answer) in enumerate(zip(cohort, proposals, answers, strict=True)):
            branches = {(each.accepted, each.token_id): each for each in answer.branches}
            assert 0 < len(branches) == len(answer.branches) <= BRANCHES
            probabilities = [each.probability for each in answer.branches]
            assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) <= 1 + 1e-6
            for (accepted, token), branch in branches.items():
                assert accepted == len(drafts) or drafts[accepted] != token
                assert branch.proposal.token_ids.tolist() == asked_afresh(fresh, driven, drafts, branch)
            accepted, token = verify(verifier, driven, drafts)
            driven.told = len(driven.tokens) + accepted
            driven.tokens += [*drafts[:accepted], token]
            hit = branches.get((accepted, token))
            hits += hit is not None
            corrections += hit is not None and accepted < len(drafts)
            if hit is None or rng.random() < 0.3:
                missed.append(index)
            else:
                proposals[index] = hit.proposal.token_ids.tolist()
        asked = [cohort[index].propose_item() for index in missed]
        for index, item, answer in zip(missed, asked, propose(drafter, *asked) if asked else [], strict=True):
            assert not answer.lost
            text = cohort[index].tokens
            whole = ProposeItem(index, 0, 0, token_ids(text), K, cohort[index].sampling, cohort[index].prompt_tokens)
            assert answer.proposal.token_ids.tolist() == propose(plain, whole)[0].proposal.token_ids.tolist()
            proposals[index] = answer.proposal.token_ids.tolist()
            cohort[index].told = item.first_position + len(item.committed)
        assert drafter.stats().sequences == len(cohort)
    assert hits > corrections > 5
    assert all_back(engine, drafter)


def test_what_was_drafted_ahead_is_not_read_again(load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round reads its last draft, and then its branch."""
    engine = load_engine()
    drafter, [driven] = ModelDrafter(engine), sequences([GREEDY])
    drafts = propose(drafter, driven.propose_item())[0].proposal.token_ids.tolist()
    driven.told = len(driven.tokens)
    steps: list[int] = []
    forward = engine.forward

    def noted(inputs: list[object]) -> object:
        steps.append(sum(len(each.token_ids) for each in inputs))  # type: ignore[attr-defined]
        return forward(inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "forward", noted)
    for _ in range(4):
        steps.clear()
        [branch] = ahead(drafter, driven.ahead_item(drafts, branches=1))[0].branches
        assert steps == [1, *[1] * K]
        driven.told = len(driven.tokens) + branch.accepted
        driven.tokens += [*drafts[: branch.accepted], branch.token_id]
        drafts = branch.proposal.token_ids.tolist()
    monkeypatch.undo()
    plain = propose(ModelDrafter(load_engine()), replace(driven, told=0).propose_item())[0]
    assert drafts == plain.proposal.token_ids.tolist()


@pytest.mark.parametrize("steps", [1, 2, K, K + 1, K + 4])
def test_corrections_begin_in_the_step_that_reads_the_last_draft_and_other_branches_in_the_next(
    load_engine: LoadEngine, noisy: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    engine, fresh = load_engine(noisy), ModelDrafter(load_engine(noisy, prefix_caching=False))
    drafter, cohort = ModelDrafter(engine), sequences(SAMPLINGS[:3])
    proposals = [each.proposal.token_ids.tolist() for each in propose(drafter, *[s.propose_item() for s in cohort])]
    for each in cohort:
        each.told = len(each.tokens)
    read: list[int] = []
    forward = engine.forward

    def noted(inputs: list[object]) -> object:
        read.append(len(inputs))
        return forward(inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "forward", noted)
    items = [replace(s.ahead_item(drafts), steps=steps) for s, drafts in zip(cohort, proposals, strict=True)]
    answers = ahead(drafter, *items)
    assert len(read) == min(steps, K + 1)
    # One branch of each is left for what comes behind all drafts.
    assert read[0] == len(cohort) * BRANCHES
    for driven, drafts, answer in zip(cohort, proposals, answers, strict=True):
        assert any(branch.accepted == K for branch in answer.branches) == (steps > 1)
        for branch in answer.branches:
            most = min(K, steps - (branch.accepted == K))
            assert branch.proposal.token_ids.tolist() == asked_afresh(fresh, driven, drafts, branch)[:most]
    assert all_back(engine, drafter)


def test_commits_and_drafts_have_been_read_whoever_proposed_them(load_engine: LoadEngine) -> None:
    engine = load_engine()
    drafter, [driven] = ModelDrafter(engine), sequences([GREEDY])
    propose(drafter, driven.propose_item(k=0))
    driven.told = len(driven.tokens)
    driven.tokens += [9, 8]
    assert not ahead(drafter, driven.ahead_item([50, 51, 52], branches=0))[0].lost
    driven.told = len(driven.tokens) + 3
    driven.tokens += [50, 51, 52, 7]
    after = propose(drafter, driven.propose_item())[0]
    assert not after.lost
    whole = replace(driven, told=0).propose_item()
    expected = propose(ModelDrafter(load_engine()), whole)[0]
    assert after.proposal.token_ids.tolist() == expected.proposal.token_ids.tolist()
    assert all_back(engine, drafter)


def test_an_unknown_sequence_is_lost_and_a_ratio_sequence_gets_no_branches(load_engine: LoadEngine) -> None:
    engine = load_engine()
    drafter, [known, unknown] = ModelDrafter(engine), sequences([SAMPLINGS[1], GREEDY])
    proposal = propose(drafter, known.propose_item(verification=Verification.RATIO))[0].proposal
    known.told, unknown.told = len(known.tokens), 3
    answers = ahead(drafter, unknown.ahead_item([4]), known.ahead_item(proposal.token_ids.tolist()))
    assert [each.lost for each in answers] == [True, False] and not any(each.branches for each in answers)
    known.tokens += [*proposal.token_ids.tolist(), 5]
    known.told = len(known.tokens) - 1
    assert len(propose(drafter, known.propose_item(verification=Verification.RATIO))[0].proposal) == K
    assert all_back(engine, drafter)


@pytest.mark.parametrize("spare_blocks", range(9))
def test_where_blocks_run_out_there_are_fewer_branches_and_forks_make_room_for_drafts(
    load_engine: LoadEngine, spare_blocks: int
) -> None:
    engine = load_engine(block_tokens=4)
    drafter, pair = ModelDrafter(engine), sequences([GREEDY, SAMPLINGS[1]])
    first, second = pair
    drafts = propose(drafter, first.propose_item())[0].proposal.token_ids.tolist()
    first.told = len(first.tokens)
    ballast = engine._blocks.allocate(engine.free_blocks - spare_blocks)
    answer = ahead(drafter, first.ahead_item(drafts))[0]
    # A branch takes two blocks, or one if it begins where a block does.
    assert (len(answer.branches) > 0) >= (spare_blocks >= 2) and len(answer.branches) <= spare_blocks
    assert len(answer.branches) < BRANCHES or spare_blocks > 5
    engine._blocks.free(ballast[: max(0, 3 - spare_blocks)])
    taken = ballast[max(0, 3 - spare_blocks) :]
    # Another sequence needs what the forks hold: 8 tokens of prompt and 2 of drafts.
    assert len(propose(drafter, second.propose_item())[0].proposal) == K
    first.tokens.append(7)
    engine._blocks.free(taken)
    assert len(propose(drafter, first.propose_item())[0].proposal) == K
    assert all_back(engine, drafter)


def test_nothing_goes_beyond_the_drafters_context(load_engine: LoadEngine) -> None:
    engine = load_engine()
    drafter = ModelDrafter(engine)
    for length in range(CONTEXT - 7, CONTEXT + 1):
        tokens = [(5 * position) % 90 + 3 for position in range(length)]
        item = ProposeItem(1, 0, 0, token_ids(tokens), K, GREEDY, length)
        drafts = propose(drafter, item)[0].proposal.token_ids
        answer = ahead(drafter, DraftAheadItem(1, 0, length, token_ids([]), drafts, K, BRANCHES))[0]
        for branch in answer.branches:
            behind = length + branch.accepted + 1
            assert behind <= CONTEXT and 0 < len(branch.proposal) <= CONTEXT + 1 - behind
        drafter.release((1,))
    assert not ahead(drafter, DraftAheadItem(1, 0, 0, token_ids([]), token_ids([4]), K, 1))[0].branches
    assert all_back(engine, drafter)


def test_random_operations_lose_no_block(load_engine: LoadEngine) -> None:
    engine = load_engine(block_tokens=4)
    drafter, rng = ModelDrafter(engine), random.Random(8)
    cohort, known = sequences(SAMPLINGS), set[int]()
    for _ in range(300):
        chosen = rng.sample(cohort, rng.randint(1, 3))
        action = rng.choice(["propose", "ahead", "ahead", "release", "forget"])
        if action == "release":
            drafter.release([each.number for each in chosen])
            known -= {each.number for each in chosen}
        elif action == "propose":
            for each in chosen:
                if each.number not in known or len(each.tokens) > 100:
                    each.tokens, each.told = list(PROMPTS[each.number % 6]), 0
            assert not any(each.lost for each in propose(drafter, *[each.propose_item() for each in chosen]))
            known |= {each.number for each in chosen}
            for each in chosen:
                each.told = len(each.tokens)
        elif action == "ahead":
            drafts = {each.number: [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))] for each in chosen}
            answers = ahead(drafter, *[each.ahead_item(drafts[each.number]) for each in chosen])
            for each, answer in zip(chosen, answers, strict=True):
                assert answer.lost == (each.number not in known)
                if answer.branches and rng.random() < 0.8:
                    branch = rng.choice(answer.branches)
                    each.told = len(each.tokens) + branch.accepted
                    each.tokens += [*drafts[each.number][: branch.accepted], branch.token_id]
        elif rng.random() < 0.1:
            drafter.release(None)
            known.clear()
            assert engine.free_blocks == engine.total_blocks
        assert drafter.stats().sequences == len(known)
        held = {block for cache in engine._sequences.values() for block in cache.blocks}
        assert len(held) == engine.total_blocks - engine.free_blocks
    assert all_back(engine, drafter)


def test_branches_keep_to_the_grammar_of_what_they_follow(load_engine: LoadEngine, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    save_model(config, tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    rules = LogitRules(grammar=Grammar(GrammarKind.REGEX, "(ab|cd+|[xyz]{2,9}){3,20}"), end_token_ids=(0,))
    engine = load_engine(tmp_path, kv_cache_gib=0.01)
    drafter, fresh = ModelDrafter(engine), ModelDrafter(load_engine(tmp_path, kv_cache_gib=0.01))
    cohort = sequences([replace(GREEDY, rules=rules), SamplingParams(0.9, seed=4, rules=rules)])
    rng = random.Random(3)
    for _ in range(8):
        asked = [each.propose_item() for each in cohort]
        proposals = [each.proposal.token_ids.tolist() for each in propose(drafter, *asked)]
        for each in cohort:
            each.told = len(each.tokens)
        answers = ahead(drafter, *[s.ahead_item(p) for s, p in zip(cohort, proposals, strict=True)])
        for driven, drafts, answer in zip(cohort, proposals, answers, strict=True):
            assert answer.branches
            for branch in answer.branches:
                assert branch.proposal.token_ids.tolist() == asked_afresh(fresh, driven, drafts, branch)
            branch = rng.choice(answer.branches)
            driven.told = len(driven.tokens) + branch.accepted
            driven.tokens += [*drafts[: branch.accepted], branch.token_id]
    assert all_back(engine, drafter)
