"""Several drafters: each class of traffic finds the one that is good at it, and one that is no good is benched."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from tests.fakes import Guess, ScriptedDrafter, ScriptedTarget, never_right, sometimes_right, toy_next
from tests.router.helpers import (
    ask,
    ask_all,
    assert_nothing_is_left,
    plainly,
    request,
    run,
    serving,
    until,
)
from workers.messages import GenerationRequest, ProposeRequest, SamplingParams, VerifyRequest
from workers.router.breaker import CircuitBreaker
from workers.router.router import Router


def of_class(number: int, name: str, max_tokens: int = 24) -> GenerationRequest:
    return replace(request(max_tokens=max_tokens, number=number), traffic_class=name)


def good_at(even: bool) -> Guess:
    """A guess that is right for requests of even, or of odd, numbers."""

    def guess(history: Sequence[int], sampling: SamplingParams) -> int:
        right = (sampling.seed % 2 == 0) is even
        return (toy_next if right else never_right)(history, sampling)

    return guess


async def bench_states(router: Router) -> dict[str, bool]:
    return {report.name: report.benched for report in (await router.status()).drafters}


def test_each_class_of_traffic_finds_its_drafter() -> None:
    async def test() -> None:
        target = ScriptedTarget()
        drafters = [
            ScriptedDrafter(good_at(True), worker_id="draft-even", name="even"),
            ScriptedDrafter(good_at(False), worker_id="draft-odd", name="odd"),
        ]
        asked = [of_class(number, "even" if number % 2 == 0 else "odd") for number in range(160)]
        answers = []
        async with serving(target, *drafters) as router:
            for start in range(0, len(asked), 8):
                answers += await ask_all(router, asked[start : start + 8])
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            await assert_nothing_is_left(router, target, *drafters)
        late = list(zip(asked, answers, strict=True))[80:]
        good = sum(answer.usage.drafter == each.traffic_class for each, answer in late)
        assert good / len(late) >= 0.9

    run(test)


def test_a_drafter_that_is_never_right_is_benched_within_fifty_rounds_and_its_sequences_move() -> None:
    async def test() -> None:
        target = ScriptedTarget(delay_s=0.0005)
        bad = ScriptedDrafter(never_right, worker_id="draft-bad", name="bad")
        good = ScriptedDrafter(worker_id="draft-good", name="good")
        async with serving(target, bad, bench_drafters=True) as router:
            asked = request(max_tokens=200)
            task = asyncio.create_task(ask(router, asked))
            while not (await bench_states(router)).get("bad"):
                await asyncio.sleep(0.0005)
            assert sum(isinstance(message, ProposeRequest) for message in bad.messages) <= 50
            steps = bad.steps
            await router.register(good.registration, good)
            answer = await task
            assert answer.tokens == plainly(asked)
            assert bad.steps <= steps + 1
            # New sequences go to the drafter that is in use.
            second = await ask(router, request(max_tokens=40, number=1))
            assert second.usage.drafter == "good"
            assert second.usage.accepted_tokens > 0
            await assert_nothing_is_left(router, target, bad, good)

    run(test)


def test_sequences_of_a_drafter_that_is_benched_go_on_with_another_at_once() -> None:
    async def test() -> None:
        target = ScriptedTarget(delay_s=0.0005)
        bad = ScriptedDrafter(never_right, worker_id="draft-0", name="a")
        good = ScriptedDrafter(worker_id="draft-1", name="b")
        asked = [request(max_tokens=120, number=number) for number in range(6)]
        async with serving(target, bad, bench_drafters=True) as router:
            task = asyncio.create_task(ask_all(router, asked))
            await until(lambda: bad.steps > 0)
            await router.register(good.registration, good)
            answers = await task
            assert [answer.tokens for answer in answers] == [plainly(each) for each in asked]
            assert {answer.usage.drafter for answer in answers} == {"b"}
            assert (await bench_states(router)) == {"a": True, "b": False}
            await assert_nothing_is_left(router, target, bad, good)

    run(test)


def test_without_benching_a_bad_drafter_goes_on() -> None:
    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter(never_right)
        async with serving(target, drafter) as router:
            answer = await ask(router, request(max_tokens=100))
            assert answer.usage.draft_tokens > 300
            assert (await bench_states(router)) == {"toy-draft": False}

    run(test)


def test_a_benched_drafter_that_has_become_good_is_found_out() -> None:
    right = {"percent": 0}

    def guess(history: Sequence[int], sampling: SamplingParams) -> int:
        return sometimes_right(right["percent"])(history, sampling)

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter(guess)
        async with serving(target, drafter, bench_drafters=True) as router:
            record = router._drafters.record("draft-0")
            assert record is not None
            record.breaker = CircuitBreaker(first_pause_s=0.01)
            await ask(router, request(max_tokens=80))
            assert (await bench_states(router))["toy-draft"]
            right["percent"] = 100
            for number in range(200):
                await ask(router, request(max_tokens=20, number=number))
                if not (await bench_states(router))["toy-draft"]:
                    break
            else:
                raise AssertionError("the drafter was never tried again")
            assert (await ask(router, request(max_tokens=40))).usage.accepted_tokens > 20

    run(test)


def test_targets_do_not_share_drafters_while_there_are_enough() -> None:
    async def test() -> None:
        targets = [ScriptedTarget(worker_id=f"target-{index}", delay_s=0.001) for index in range(2)]
        drafters = [ScriptedDrafter(worker_id=f"draft-{index}") for index in range(4)]
        # Long prompts leave less room at the drafter that read them; that alone must not decide.
        asked = [request(3 if number % 2 else 80, max_tokens=16, number=number) for number in range(8)]
        async with serving(*targets, *drafters) as router:
            answers = await ask_all(router, asked)
        assert [answer.tokens for answer in answers] == list(map(plainly, asked))
        served = [sequences_of(target, VerifyRequest) for target in targets]
        drafted = [sequences_of(drafter, ProposeRequest) for drafter in drafters]
        assert all(served)
        assert all(drafted)
        assert all(any(sequences <= of_target for of_target in served) for sequences in drafted)

    run(test)


def sequences_of(worker: ScriptedTarget | ScriptedDrafter, kind: type) -> set[int]:
    return {item.sequence_id for message in worker.messages if isinstance(message, kind) for item in message.items}  # type: ignore[attr-defined]
