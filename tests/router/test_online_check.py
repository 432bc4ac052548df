"""The online check: whom it checks, what it finds and what it says."""

import asyncio
import logging
from dataclasses import replace

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, SwayedTarget, sometimes_right
from tests.router.helpers import (
    TOKENIZER,
    Answer,
    ask,
    ask_all,
    assert_nothing_is_left,
    checks_done,
    plainly,
    request,
    run,
    serving,
    turns,
)
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.messages import (
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    LogitRules,
    OnlineCheckTotals,
    Proposal,
    Resumption,
    RoundTotals,
    SpeculationUsage,
    TokenChunk,
    Verification,
    VerifiedItem,
    token_ids,
)
from workers.router.config import RouterConfig
from workers.router.online_check import OnlineChecks, is_chosen, is_comparable
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence

COUNTS = ("verifications", "draft_tokens", "accepted_tokens", "committed_tokens")


def cold(number: int = 0, max_tokens: int = 20, temperature: float = 0.0, **options: object) -> GenerationRequest:
    """A request at another temperature than 1, which the toy model does not heed."""
    asked = request(max_tokens=max_tokens, number=number, **options)  # type: ignore[arg-type]
    return replace(asked, sampling=replace(asked.sampling, temperature=temperature))


@pytest.mark.parametrize("percent", [0, 60, 100])
def test_answers_that_drafts_did_not_change_are_checked_and_equal(percent: int) -> None:
    asked = [request(1 + number, 12, number) for number in range(10)]
    target, drafter = ScriptedTarget(), ScriptedDrafter(sometimes_right(percent))

    async def test() -> OnlineCheckTotals:
        async with serving(target, drafter, check_share=1.0) as router:
            assert [answer.tokens for answer in await ask_all(router, asked)] == list(map(plainly, asked))
            totals = await checks_done(router)
            await assert_nothing_is_left(router, target, drafter)
            return totals

    assert run(test) == OnlineCheckTotals(checked=10, compared_tokens=120)


def test_a_request_that_another_router_began_is_checked_from_its_first_token() -> None:
    asked = request()
    whole = plainly(asked)
    resumed = replace(asked, resumption=Resumption(token_ids(whole[:5])))

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=1.0) as router:
            assert (await ask(router, resumed)).tokens == whole[5:]
            return await checks_done(router)

    assert run(test) == OnlineCheckTotals(checked=1, compared_tokens=len(whole))


def test_answers_that_stopped_early_are_checked_to_their_end_and_no_further() -> None:
    end = plainly(request())[6]
    asked = request(end_token_ids=frozenset({end}))

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=1.0) as router:
            answer = await ask(router, asked)
            assert len(answer.tokens) < asked.stop.max_tokens
            totals = await checks_done(router)
            assert totals.compared_tokens == len(answer.tokens)
            return totals

    assert run(test).checked == 1


SECRET = Grammar(GrammarKind.REGEX, "what only the client knows")


def test_an_answer_that_drafts_changed_is_reported_with_its_place_and_both_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = request(number=3, max_tokens=30)
    asked = replace(asked, sampling=replace(asked.sampling, rules=LogitRules(presence_penalty=0.5, grammar=SECRET)))
    workers = SwayedTarget(sways_at=15), ScriptedDrafter(trusting=True)

    async def test() -> tuple[Answer, OnlineCheckTotals]:
        async with serving(*workers, check_share=1.0) as router:
            answer = await ask(router, asked)
            totals = await checks_done(router)
            await assert_nothing_is_left(router, *workers)
            return answer, totals

    with caplog.at_level(logging.ERROR):
        answer, totals = run(test)
    right = plainly(asked)
    place = next(index for index, token in enumerate(answer.tokens) if token != right[index])
    assert totals == OnlineCheckTotals(checked=1, mismatched=1, compared_tokens=place + 1)
    (record,) = caplog.records
    line = record.getMessage()
    assert f"request request-3 differs at token {place} of its answer" in line
    assert f"id {answer.tokens[place]} with drafts, id {right[place]} without" in line
    assert "seed=3" in line and "presence_penalty=0.5" in line
    assert "\n" not in line and str(asked.prompt.tolist()) not in line
    assert "regex" in line and SECRET.source not in line


def test_an_answer_that_drafts_ended_too_early_differs_at_its_last_token() -> None:
    asked = request(number=4, max_tokens=30)
    wrong_place, wrong_token = 9, 25  # what a target that sways at position 10 answers; the assertions below say so

    async def test() -> OnlineCheckTotals:
        async with serving(SwayedTarget(sways_at=10), ScriptedDrafter(trusting=True), check_share=1.0) as router:
            stopped = replace(asked, stop=replace(asked.stop, end_token_ids=frozenset({wrong_token})))
            tokens = (await ask(router, stopped)).tokens
            assert tokens[:-1] == plainly(asked)[:wrong_place] and tokens[-1] == wrong_token
            return await checks_done(router)

    assert run(test) == OnlineCheckTotals(checked=1, mismatched=1, compared_tokens=10)


def test_nothing_is_checked_without_a_share() -> None:
    target = ScriptedTarget()

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter()) as router:
            await ask_all(router, [request(number=number) for number in range(5)])
            await turns(50)
            return (await router.status()).online_check

    assert run(test) == OnlineCheckTotals()


def test_half_a_share_checks_about_half_and_always_the_same() -> None:
    asked = [request(4, 6, number) for number in range(60)]
    expected = sum(is_chosen(each.request_id, 0.5) for each in asked)

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=0.5, check_max_pending=60) as router:
            await ask_all(router, asked)
            return await checks_done(router)

    assert run(test).checked == run(test).checked == expected
    assert 20 <= expected <= 40


def test_the_choice_depends_on_the_id_alone_and_grows_with_the_share() -> None:
    ids = [f"cmpl-{number}-0" for number in range(4000)]
    tenth = {each for each in ids if is_chosen(each, 0.1)}
    assert 320 <= len(tenth) <= 480
    assert tenth <= {each for each in ids if is_chosen(each, 0.3)}
    assert all(is_chosen(each, 1.0) and not is_chosen(each, 0.0) for each in ids)


@pytest.mark.parametrize(
    ("asked", "draft_tokens", "deployment", "comparable"),
    [
        (cold(temperature=0.8), 4, Verification.COUPLED, True),
        (cold(temperature=0.8), 0, Verification.COUPLED, False),
        (cold(temperature=0.8), 4, Verification.RATIO, False),
        (cold(temperature=0.0), 4, Verification.RATIO, True),
        (cold(temperature=0.8, verification=Verification.RATIO), 4, Verification.COUPLED, False),
        (cold(temperature=0.8, verification=Verification.COUPLED), 4, Verification.RATIO, True),
    ],
)
def test_ids_are_compared_where_they_must_be_equal(
    asked: GenerationRequest, draft_tokens: int, deployment: Verification, comparable: bool
) -> None:
    assert is_comparable(asked, SpeculationUsage(draft_tokens=draft_tokens), deployment) is comparable


def test_requests_with_nothing_to_compare_are_skipped() -> None:
    asked = [
        cold(0, temperature=0.8, verification=Verification.RATIO),
        cold(1, enabled=False),
        cold(2, verification=Verification.RATIO),
    ]

    async def test() -> OnlineCheckTotals:
        async with serving(ScriptedTarget(), ScriptedDrafter(), check_share=1.0) as router:
            await ask_all(router, asked)
            return await checks_done(router)

    assert run(test) == OnlineCheckTotals(checked=1, skipped=2, compared_tokens=20)


def test_requests_that_were_cancelled_or_failed_are_not_checked() -> None:
    target = ScriptedTarget()
    target.faulty_first_token = int(request(number=1).prompt[0])

    async def test() -> OnlineCheckTotals:
        async with serving(target, ScriptedDrafter(), check_share=1.0) as router:
            assert (await ask(router, request(number=1))).failure is not None
            task = asyncio.create_task(ask(router, request(max_tokens=100)))
            await turns(20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await turns(20)
            return router._checks.totals

    assert run(test) == OnlineCheckTotals()


def test_usage_and_totals_of_clients_are_what_they_are_without_checks() -> None:
    asked = [request(5, 20, number) for number in range(6)]

    async def test(share: float) -> tuple[list[SpeculationUsage], RoundTotals]:
        async with serving(ScriptedTarget(), ScriptedDrafter(sometimes_right(50)), check_share=share) as router:
            # One after the other, with the checks between them: rounds that serve only a check must not count.
            usages = []
            for each in asked:
                usages.append((await ask(router, each)).usage)
                await checks_done(router)
            status = await router.status()
            assert status.running == 0
            assert status.online_check.checked == (6 if share else 0)
            return usages, status.totals

    with_checks, without = run(lambda: test(1.0)), run(lambda: test(0.0))
    assert with_checks[0] == without[0]
    assert with_checks[1].rounds == without[1].rounds
    assert with_checks[1].verify_compute_ms == without[1].verify_compute_ms
    for count in COUNTS:
        assert getattr(with_checks[1], count) == getattr(without[1], count)


class Stage:
    """OnlineChecks without a router: `placed` is what was asked to be decoded again."""

    def __init__(self) -> None:
        self.placed: list[RunningSequence] = []
        self.taken_out: list[RunningSequence] = []
        config = RouterConfig(check_share=1.0)
        self.checks = OnlineChecks(config, self._place, self.taken_out.append, self.taken_out.append)

    def finish(self, asked: GenerationRequest, tokens: list[int]) -> None:
        """A client's request ends with these tokens, of which the first was a draft."""
        sequence = self._sequence(asked)
        sequence.commit(VerifiedItem(1, 0, 1, token_ids(tokens)), Proposal(token_ids(tokens[:1])))
        sequence.finish_reason = FinishReason.STOP
        self.checks.offer(RunningSequence(sequence, 0.0))
        self.checks.start()

    def _place(self, asked: GenerationRequest, deadline_s: float) -> RunningSequence:
        self.placed.append(RunningSequence(self._sequence(asked), deadline_s, is_check=True))
        return self.placed[-1]

    def _sequence(self, asked: GenerationRequest) -> Sequence:
        return Sequence(1, asked, lambda prompt: IncrementalDetokenizer(TOKENIZER, prompt.tolist()))


def test_an_answer_that_should_have_gone_on_differs_where_it_ends() -> None:
    async def test() -> OnlineCheckTotals:
        stage = Stage()
        stage.finish(request(max_tokens=20), [16, 17, 18])
        (again,) = stage.placed
        assert again.sequence.request.stop.max_tokens == 4
        again.emit(TokenChunk(token_ids([16, 17, 18, 19]), None, FinishReason.LENGTH))
        await turns()
        return stage.checks.totals

    assert run(test) == OnlineCheckTotals(checked=1, mismatched=1, compared_tokens=4)


def test_a_check_that_has_ended_is_concluded_rather_than_put_off() -> None:
    async def test() -> OnlineCheckTotals:
        stage = Stage()
        stage.finish(request(max_tokens=3), [16, 17, 18])
        (again,) = stage.placed
        again.emit(TokenChunk(token_ids([16, 17, 18]), None, FinishReason.LENGTH))
        again.ended = True
        assert not stage.checks.make_room()
        await turns()
        return stage.checks.totals

    assert run(test) == OnlineCheckTotals(checked=1, compared_tokens=3)
