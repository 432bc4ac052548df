"""Prompt tokens beside streams: the fit of step times, the limit that follows from it, and what lanes make of it."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import ScriptedDrafter, ScriptedTarget
from tests.router.helpers import Answer, ask, ask_all, plainly, request, run, serving, until
from workers.messages import VerifyItem, VerifyRequest
from workers.router.prefill import PrefillLimits, StepTimeFit, StepTimes, fit_line

LIMITS = PrefillLimits(most_tokens=512, least_tokens=16, latency_factor=2.0)

# --- the fit -------------------------------------------------------------------------------------------------


@given(base=st.floats(0, 100), token=st.floats(0.001, 10), sizes=st.sets(st.integers(1, 4096), min_size=2, max_size=12))
@settings(max_examples=200)
def test_points_on_a_line_give_the_line(base: float, token: float, sizes: set[int]) -> None:
    fit = fit_line([(size, base + token * size) for size in sizes])
    assert fit is not None
    assert fit.token_ms == pytest.approx(token, rel=1e-6, abs=1e-9)
    assert fit.base_ms == pytest.approx(base, rel=1e-6, abs=1e-6 * token * max(sizes))


def test_points_of_one_size_give_no_line() -> None:
    assert fit_line([]) is None
    assert fit_line([(5, 1.0), (5, 2.0)]) is None


def test_neither_part_of_a_fit_is_negative() -> None:
    assert fit_line([(1, 10.0), (100, 1.0)]) == StepTimeFit(5.5, 0.0)
    fit = fit_line([(10, 1.0), (100, 100.0)])
    assert fit is not None and fit.base_ms == 0.0 and fit.token_ms > 1.0


def test_the_fit_survives_noise_hiccups_and_a_thousand_small_steps() -> None:
    times, numbers = StepTimes(), random.Random(3)
    for number in range(1200):
        # Prompts are read at first, and then nothing but decoding for a long time.
        tokens = numbers.randint(100, 600) if number < 40 else numbers.randint(4, 24)
        ms = (20 + 0.5 * tokens) * numbers.uniform(0.9, 1.1)
        times.observe(tokens, ms * (30 if numbers.random() < 0.1 else 1))
    fit = times.fit()
    assert fit is not None
    assert fit.token_ms == pytest.approx(0.5, rel=0.15)
    assert fit.time_ms(12) == pytest.approx(26, rel=0.15)


def test_the_fit_follows_a_target_that_becomes_slower() -> None:
    times = StepTimes()
    for slowness in (1, 3):
        for _ in range(20):
            for tokens in (4, 8, 100, 500):
                times.observe(tokens, slowness * (10 + 0.1 * tokens))
    fit = times.fit()
    assert fit is not None
    assert (fit.base_ms, fit.token_ms) == pytest.approx((30, 0.3))


def test_small_steps_have_a_line_of_their_own() -> None:
    def step_ms(tokens: int) -> float:
        """A 70B model on four A100s: reading its weights takes 26 ms, computing longer from about 120 tokens on."""
        return max(26.0, 0.22 * tokens)

    times = StepTimes()
    for tokens in (4, 12, 24, 60, 1024, 2048):
        times.observe(tokens, step_ms(tokens))
    small, all_of_them = times.fit_or_flat(up_to=60), times.fit_or_flat()
    assert small == StepTimeFit(26.0, 0.0)
    assert all_of_them is not None and all_of_them.time_ms(60) > 1.2 * step_ms(60)
    # Where only prompts were read so far, there is nothing better than their line.
    few = StepTimes()
    for tokens in (4, 1024):
        few.observe(tokens, step_ms(tokens))
    assert few.fit_or_flat(up_to=60) == few.fit_or_flat()


# --- the limit -----------------------------------------------------------------------------------------------


@given(
    base=st.floats(0, 100),
    token=st.floats(0, 10),
    decoding=st.integers(1, 300),
    factor=st.floats(1.01, 10),
    least=st.integers(1, 64),
    most=st.integers(1, 4096),
)
@settings(max_examples=300)
def test_the_predicted_step_stays_within_the_factor_unless_that_would_stop_prompts(
    base: float, token: float, decoding: int, factor: float, least: int, most: int
) -> None:
    fit = StepTimeFit(base, token)
    prompt = PrefillLimits(most, least, factor).prompt_tokens(decoding, fit)
    assert min(least, most) <= prompt <= most
    allowed = factor * fit.time_ms(decoding)
    if prompt > least:
        assert fit.time_ms(decoding + prompt) <= allowed * (1 + 1e-9)
    if prompt < most:
        assert fit.time_ms(decoding + prompt + 1) > allowed * (1 - 1e-9)


def test_without_streams_the_whole_chunk_is_read_and_without_a_fit_a_little() -> None:
    assert LIMITS.prompt_tokens(0, None) == 512
    assert LIMITS.prompt_tokens(0, StepTimeFit(0.0, 100.0)) == 512
    assert LIMITS.prompt_tokens(5, None) == 16
    assert PrefillLimits(3, 16, 2.0).prompt_tokens(5, None) == 3


# --- in rounds -----------------------------------------------------------------------------------------------


def steps_of(target: ScriptedTarget) -> list[tuple[VerifyItem, ...]]:
    return [message.items for message in target.messages if isinstance(message, VerifyRequest)]


def modelled_ms(target: ScriptedTarget, items: tuple[VerifyItem, ...], streams_only: bool = False) -> float:
    counted = [item for item in items if not streams_only or (item.sample and len(item.committed) == 1)]
    return 1.0 + target.token_ms * sum(len(item.committed) + len(item.proposal) for item in counted)


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_beside_streams_a_long_prompt_is_read_in_pieces_that_the_target_takes_in_its_stride(factor: float) -> None:
    target, drafter = (
        ScriptedTarget(total_blocks=10_000, context_length=4096, delay_s=0.001),
        ScriptedDrafter(total_blocks=10_000),
    )
    target.token_ms = 0.02
    drafter.context_length = 4096
    streams = [request(9, 300, number) for number in range(4)]
    long = request(2000, 8, 9)

    async def test() -> None:
        async with serving(target, drafter, prefill_chunk_tokens=1024, prefill_latency_factor=factor) as router:
            await ask(router, request(300, 8, 8))  # the router sees a prompt, and learns
            seen = [Answer() for _ in streams]
            tasks = [asyncio.create_task(ask(router, each, into)) for each, into in zip(streams, seen, strict=True)]
            await until(lambda: all(len(answer.chunks) > 3 for answer in seen))
            first = len(steps_of(target))
            assert (await ask(router, long)).tokens == plainly(long)
            beside = [
                step
                for step in steps_of(target)[first:]
                if any(len(item.committed) > 1 for item in step) and len(step) > 1
            ]
            for step in beside:
                assert modelled_ms(target, step) <= factor * modelled_ms(target, step, streams_only=True) * 1.05
            assert len(beside) > 3
            for task, each in zip(tasks, streams, strict=True):
                assert (await task).tokens == plainly(each)

    run(test)


def test_alone_a_prompt_is_read_in_whole_chunks() -> None:
    target = ScriptedTarget(total_blocks=1000, context_length=2048)
    target.token_ms = 5.0

    async def test() -> None:
        async with serving(target, prefill_chunk_tokens=512) as router:
            asked = request(1100, 4)
            assert (await ask(router, asked)).tokens == plainly(asked)

    run(test)

    assert [len(step[0].committed) for step in steps_of(target)[:3]] == [512, 512, 76]


def test_however_slow_the_target_prompts_come_to_an_end_the_first_one_first() -> None:
    target = ScriptedTarget(total_blocks=1000)
    target.token_ms = 1000.0
    stream, prompts = request(5, 120, 0), [request(80, 4, number) for number in (1, 2, 3)]
    ended: list[int] = []

    async def test() -> None:
        async with serving(target, max_draft_tokens=0) as router:
            seen = Answer()
            task = asyncio.create_task(ask(router, stream, seen))
            await until(lambda: len(seen.chunks) > 2)

            async def ask_and_note(number: int) -> None:
                assert (await ask(router, prompts[number])).tokens == plainly(prompts[number])
                ended.append(number)

            await asyncio.gather(*(ask_and_note(number) for number in range(3)))
            assert not task.done() and ended == [0, 1, 2]
            assert (await task).tokens == plainly(stream)

    run(test)

    shares = [sum(len(item.committed) for item in step if len(item.committed) > 1) for step in steps_of(target)[2:]]
    assert max(shares) == target.block_tokens


def test_a_steady_target_without_a_slope_reads_whole_chunks_beside_streams() -> None:
    target = ScriptedTarget(total_blocks=1000)

    async def test() -> None:
        async with serving(target, prefill_chunk_tokens=64) as router:
            await ask_all(router, [request(100, 30, number) for number in range(2)])
            await ask_all(router, [request(5, 60, 2), request(200, 4, 3)])

    run(test)

    beside = [step for step in steps_of(target) if len(step) == 2 and any(len(item.committed) > 1 for item in step)]
    assert max(len(item.committed) for step in beside for item in step) == 64
