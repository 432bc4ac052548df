"""Every order in which messages between router and workers can be lost, late, doubled or swapped, up to a bound."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import Guess, ScriptedDrafter, ScriptedTarget, never_right, sometimes_right
from tests.fakes.schedules import OwnedLink, Schedule, every_script
from tests.fakes.virtual_time import VirtualLoop, run_virtually
from tests.mutants import Mutant
from tests.router.helpers import (
    ChangingLengths,
    ask_all,
    assert_nothing_is_left,
    in_service,
    make_router,
    plainly,
    request,
)
from workers.errors import LinkError
from workers.router import lane, peer, placement, rounds, router, sequence
from workers.router.router import Router

Run = Callable[[Sequence[int]], Sequence[int]]
BEAT_S = 1.0
SOMETIMES_RIGHT = sometimes_right(60)


def play(
    script: Sequence[int],
    faults: int,
    shapes: Sequence[tuple[int, int]],
    targets: int = 1,
    drafters: int = 1,
    deaths: bool = False,
    guess: Guess = SOMETIMES_RIGHT,
    lengths: Sequence[int] = (),
    **limits: Any,
) -> Sequence[int]:
    """Answer requests of these lengths while messages go as `script` says; check all there is to check.

    `lengths`: the draft lengths of the rounds, again and again; else all are `max_draft_tokens`.
    """
    asked = [request(length, tokens, number, timeout_s=1e6) for number, (length, tokens) in enumerate(shapes)]
    workers = [
        *(ScriptedTarget(f"target-{number}") for number in range(targets)),
        *(ScriptedDrafter(guess, f"draft-{number}") for number in range(drafters)),
    ]

    async def test(loop: VirtualLoop) -> Sequence[int]:
        service = make_router(ChangingLengths(lengths) if lengths else None, **limits)
        links = [OwnedLink(worker) for worker in workers]
        schedule = Schedule(loop, links, (), 0)
        for link in links:
            await service.register(link.worker.registration, link)
        schedule = Schedule(loop, links, script, faults, deaths)
        supervising = asyncio.create_task(supervise(service, links))
        answers = await ask_all(service, asked)
        await settled(lambda: schedule.is_quiet)
        options = list(schedule.options)
        schedule.ends_well()
        # Three failures at one sequence, and it is given up: anything else has to come to its end.
        failures = sum(link.failures for link in links[:targets])
        for each, answer in zip(asked, answers, strict=True):
            assert answer.failure is None or failures >= 3, answer.failure
            assert answer.failure is not None or answer.tokens == plainly(each)
            assert answer.tokens == plainly(each)[: len(answer.tokens)]
        whole = {worker.worker_id for worker in workers}
        await settled(
            lambda: schedule.is_quiet and in_service(service) == whole and not any(worker.dead for worker in workers)
        )
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await assert_nothing_is_left(service, *workers)
        assert not any(each.under_way for each in service._peers())
        assert not any(each._drafting._tickets for each in service._lanes.values())
        assert [violation for worker in workers for violation in worker.violations] == []
        await service.close()
        return options

    return run_virtually(test)


async def settled(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; the time costs nothing, but each look at it does."""
    while not condition():
        await asyncio.sleep(BEAT_S / 4)


async def supervise(service: Router, links: Sequence[OwnedLink]) -> None:
    """Do as supervisors do: start dead workers anew, and register all of them once a second."""
    while True:
        for link in links:
            if link.worker.dead:
                service.unregister(link.worker.worker_id)
                link.worker.revive()
            with contextlib.suppress(LinkError):
                await service.register(link.worker.registration, link)
        await asyncio.sleep(BEAT_S)


ONE: Run = partial(play, faults=2, shapes=[(3, 2)], max_draft_tokens=2)
COHORTS: Run = partial(play, faults=1, shapes=[(3, 4), (5, 3)], max_draft_tokens=2, max_cohorts=2)
CHANGING: Run = partial(play, faults=1, shapes=[(3, 9)], guess=never_right, lengths=(4, 0, 0), max_draft_tokens=4)
TARGETS: Run = partial(
    play, faults=1, shapes=[(3, 3), (6, 3)], targets=2, max_draft_tokens=2, prefill_chunk_tokens=4, draft_ahead=True
)


@pytest.mark.parametrize(
    ("run", "deviations", "at_least"), [(ONE, 2, 500), (CHANGING, 1, 100), (COHORTS, 1, 100), (TARGETS, 1, 100)]
)
def test_every_text_is_the_reference_and_nothing_is_left_whatever_becomes_of_messages(
    run: Run, deviations: int, at_least: int
) -> None:
    assert every_script(run, deviations) >= at_least


@given(
    script=st.lists(st.integers(0, 11), max_size=80),
    faults=st.integers(0, 6),
    targets=st.integers(1, 2),
    drafters=st.integers(0, 2),
    limits=st.fixed_dictionaries(
        {
            "max_draft_tokens": st.integers(0, 3),
            "max_cohorts": st.integers(1, 2),
            "draft_ahead": st.booleans(),
            "prefill_chunk_tokens": st.sampled_from([4, 512]),
            "max_batch_sequences": st.sampled_from([1, 32]),
        }
    ),
)
@settings(max_examples=60)
def test_long_random_courses_with_deaths_end_as_well(
    script: list[int], faults: int, targets: int, drafters: int, limits: dict[str, Any]
) -> None:
    play(script, faults, [(3, 6), (9, 5), (5, 8)], targets, drafters, deaths=True, **limits)


RELEASED = "drafter.release(sequence.sequence_id)\n            self.assign_drafters()"
COUNTED = "self._count(proposal, verified.looked_up, min(verified.accepted, len(kept)), len(kept))\n"
MUTANTS: dict[str, tuple[Mutant, Run, int]] = {
    "an answer of an older epoch is committed": (
        Mutant(lane, "running is None or verified.epoch != sequence.epoch", "running is None"),
        ONE,
        1,
    ),
    "a commit does not raise the epoch": (
        Mutant(sequence, COUNTED + "        self.epoch += 1\n", COUNTED),
        ONE,
        1,
    ),
    "the drafter's KV is not rolled back": (
        Mutant(
            sequence,
            "self.drafter.cached_tokens = min(self.drafter.cached_tokens, self._length + verified.accepted)",
            "pass",
        ),
        CHANGING,
        0,
    ),
    "drafts for older tokens count as read": (
        Mutant(rounds, "if answer.epoch != sequence.epoch:", "if False:"),
        CHANGING,
        1,
    ),
    "a drafter is not told of an end": (Mutant(placement, RELEASED, "self.assign_drafters()"), ONE, 0),
    "a release that is lost is not sent again": (
        Mutant(peer, "for _ in range(RELEASE_TRIES)", "for _ in range(1)"),
        ONE,
        1,
    ),
    "a worker comes back with what it held": (
        Mutant(router, "await link.call(ReleaseRequest(None), CONTROL_DEADLINE_S)", "pass"),
        ONE,
        1,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check, deviations = MUTANTS[name]
    mutant.install(monkeypatch)
    with pytest.raises(AssertionError):
        every_script(check, deviations)
