"""Waiting for the next event of a sequence in service."""

import asyncio
import time

import pytest

from tests.router.helpers import TOKENIZER, request, run, turns
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.messages import GenerationFailed, TokenChunk, token_ids
from workers.router.running import RunningSequence
from workers.router.sequence import Sequence


def running(timeout_s: float = 60.0) -> RunningSequence:
    sequence = Sequence(1, request(), lambda prompt: IncrementalDetokenizer(TOKENIZER, prompt.tolist()))
    return RunningSequence(sequence, time.monotonic() + timeout_s)


@pytest.mark.parametrize("loop_turns", range(5))
def test_a_cancellation_that_comes_with_an_event_is_not_forgotten(loop_turns: int) -> None:
    async def test() -> None:
        served = running()

        async def take_all() -> None:
            while True:
                await served.next_event()

        task = asyncio.create_task(take_all())
        await turns()
        served.emit(TokenChunk(token_ids([1])))
        await turns(loop_turns)
        task.cancel()
        await turns()
        assert task.cancelled()

    run(test)


def test_an_event_that_is_there_already_is_taken_even_when_time_is_up() -> None:
    async def test() -> None:
        served = running(timeout_s=-1.0)
        served.emit(TokenChunk(token_ids([1])))
        assert isinstance(await served.next_event(), TokenChunk)
        failure = await served.next_event()
        assert isinstance(failure, GenerationFailed)
        assert failure.status == 504

    run(test)
