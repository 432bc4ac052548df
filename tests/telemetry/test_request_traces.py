"""Traces of requests through the router: complete trees whatever befalls the workers, and nothing unless sampled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes import ScriptedDrafter, ScriptedTarget, ScriptedWorker, Trouble, sometimes_right
from tests.fakes.tracing import ROUND, Shown, SpanLink, Traced, assert_complete, assert_tiled, in_trace, named
from tests.router.helpers import TOKENIZER, ask, ask_all, plainly, request, run, supervised
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.messages import DraftAheadRequest, GenerationRequest, ProposeRequest, VerifyRequest
from workers.router.config import RouterConfig
from workers.router.request_record import RequestRecorder
from workers.router.router import Router
from workers.telemetry.tracing import NO_TRACING, Tracing

PARENT = "00f067aa0ba902b7"


def trace_id(number: int) -> str:
    """The id of the trace that client `number` has begun."""
    return f"{number + 1:032x}"


def traced(asked: GenerationRequest, number: int, sampled: bool = True) -> GenerationRequest:
    """The request as a client sends it that traces itself."""
    return replace(asked, trace_context={"traceparent": f"00-{trace_id(number)}-{PARENT}-0{int(sampled)}"})


@contextlib.asynccontextmanager
async def serving(tracing: Tracing, *workers: ScriptedWorker, **limits: Any) -> AsyncIterator[Router]:
    """A router that traces, with `workers` that do."""
    config = RouterConfig(**limits)
    router = Router(
        config,
        lambda prompt: IncrementalDetokenizer(TOKENIZER, prompt.tolist()),
        recorder=RequestRecorder(config.verification, tracing),
    )
    for worker in workers:
        await router.register(worker.registration, SpanLink(worker, tracing))
    try:
        yield router
    finally:
        await router.close()
        assert [violation for worker in workers for violation in worker.violations] == []


def drafts_and_commits_agree(spans: list[Shown], tokens: int) -> None:
    """What the commits of a trace say adds up."""
    commits = named(spans, "commit")
    assert sum(int(str(span.attributes["leadout.committed_tokens"])) for span in commits) == tokens
    for span in commits:
        told = {name: int(str(span.attributes[f"leadout.{name}_tokens"])) for name in ("drafted", "accepted")}
        assert span.attributes["leadout.rolled_back_tokens"] == told["drafted"] - told["accepted"]
        assert 0 <= told["accepted"] <= told["drafted"] <= int(str(span.attributes["leadout.k"]))
    epochs = [int(str(span.attributes["leadout.epoch"])) for span in commits]
    assert epochs == sorted(set(epochs))


def test_two_interleaved_requests_get_a_complete_tree_each_and_links_between_their_shared_steps() -> None:
    watch = Traced()

    async def test() -> None:
        target, drafter = ScriptedTarget(delay_s=0.004), ScriptedDrafter(sometimes_right(70), delay_s=0.002)
        async with serving(watch.tracing, target, drafter, max_draft_tokens=3) as router:
            asked = [traced(request(number=number), number) for number in range(2)]
            for each, answer in zip(asked, await ask_all(router, asked), strict=True):
                assert answer.tokens == plainly(each)

    run(test)
    spans = watch.spans
    assert {span.trace_id for span in spans} == {trace_id(0), trace_id(1)}
    for number in range(2):
        mine = in_trace(spans, trace_id(number))
        assert_complete(spans, trace_id(number), PARENT)
        assert_tiled(spans, trace_id(number), least_share=0.95)
        drafts_and_commits_agree(mine, tokens=20)
        assert named(mine, "sequence")[0].events.count("first_token") == 1
        others = {(span.trace_id, span.span_id) for span in named(spans, "verify", "draft") if span not in mine}
        shared = [span for span in named(mine, "verify.step") if span.attributes["leadout.step.sequences"] == 2]
        assert len(shared) > 2
        assert all(len(span.links) == 1 and span.links[0] in others for span in shared)
        alone = [span for span in named(mine, "verify.step") if span not in shared]
        assert not any(span.links for span in alone)
        assert {str(span.attributes["leadout.drafter"]) for span in named(mine, "draft")} == {"draft-0"}
        accepted = {span.attributes["leadout.accepted_tokens"] for span in named(mine, "commit")}
        assert len(accepted) > 1, "some drafts are accepted, some are not"


def test_a_drafters_death_is_an_event_and_the_tree_stays_whole() -> None:
    watch = Traced()

    async def test() -> None:
        target = ScriptedTarget(delay_s=0.002)
        drafter = ScriptedDrafter(delay_s=0.002, troubles={2: Trouble.DEATH})
        async with serving(watch.tracing, target, drafter, max_draft_tokens=2) as router:
            asked = traced(request(max_tokens=24), 0)
            assert (await ask(router, asked)).tokens == plainly(asked)

    run(test)
    assert_complete(watch.spans, trace_id(0), PARENT)
    assert_tiled(watch.spans, trace_id(0), least_share=0.95)
    drafts_and_commits_agree(watch.spans, tokens=24)
    assert "fallback" in named(watch.spans, "sequence")[0].events
    # The round that lost its drafter still is one; those after it have nobody to draft for them.
    assert len(named(watch.spans, "draft")) == 3
    assert len(named(watch.spans, "verify")) > 10


def test_another_drafter_takes_over_and_the_event_says_so() -> None:
    watch = Traced()

    async def test() -> None:
        first, second = ScriptedDrafter(worker_id="draft-0"), ScriptedDrafter(worker_id="draft-1")
        first.troubles = second.troubles = {1: Trouble.DEATH}
        async with serving(watch.tracing, ScriptedTarget(), first, second, max_draft_tokens=1) as router:
            await ask(router, traced(request(), 0))

    run(test)
    events = named(watch.spans, "sequence")[0].events
    assert [event for event in events if event in ("failover", "fallback")] == ["failover", "fallback"]
    assert_complete(watch.spans, trace_id(0), PARENT)


def test_a_targets_death_is_a_failed_step_and_a_failover_that_queues_and_reads_again() -> None:
    watch = Traced()

    async def test() -> None:
        target = ScriptedTarget(delay_s=0.001, troubles={3: Trouble.DEATH})
        async with serving(watch.tracing, target, ScriptedDrafter(), max_draft_tokens=1) as router:
            asked = traced(request(), 0)
            async with supervised(router, target):
                assert (await ask(router, asked)).tokens == plainly(asked)

    run(test)
    assert_complete(watch.spans, trace_id(0), PARENT)
    (sequence,) = named(watch.spans, "sequence")
    assert (sequence.events.count("failover"), sequence.events.count("first_token")) == (1, 1)
    assert [span.failed for span in named(watch.spans, "verify")].count(True) == 1
    assert (len(named(watch.spans, "queue")), len(named(watch.spans, "prefill"))) == (2, 2)
    drafts_and_commits_agree(watch.spans, tokens=20)


def test_making_room_for_others_is_an_event() -> None:
    watch = Traced()

    async def test() -> None:
        target = ScriptedTarget(total_blocks=14, delay_s=0.001)
        async with serving(watch.tracing, target, max_draft_tokens=0) as router:
            asked = [traced(request(length=12, max_tokens=40, number=number), number) for number in range(2)]
            for each, answer in zip(asked, await ask_all(router, asked), strict=True):
                assert answer.tokens == plainly(each)

    run(test)
    events = [event for span in named(watch.spans, "sequence") for event in span.events]
    assert "preemption" in events
    for number in range(2):
        assert_complete(watch.spans, trace_id(number), PARENT)


def test_drafting_ahead_shows_as_steps_of_the_drafter_and_as_hits_and_misses() -> None:
    watch = Traced()

    async def test() -> None:
        target, drafter = ScriptedTarget(delay_s=0.004), ScriptedDrafter(sometimes_right(60))
        target.token_ms = 2.0
        limits = {"max_draft_tokens": 3, "draft_ahead": True}
        async with serving(watch.tracing, target, drafter, **limits) as router:
            await ask(router, traced(request(max_tokens=60), 0))
            totals = (await router.status()).totals
            told = [span.attributes.get("leadout.draft_ahead") for span in named(watch.spans, "draft")]
            assert (told.count("hit"), told.count("miss")) == (totals.ahead_hits, totals.ahead_misses)
            assert totals.ahead_hits > 0 and totals.ahead_misses > 0
            sent = [message for message in drafter.messages if isinstance(message, DraftAheadRequest)]
            assert len(named(watch.spans, "draft_ahead.step")) == len(sent)

    run(test)
    assert_complete(watch.spans, trace_id(0), PARENT)


@pytest.mark.parametrize("watched", [True, False], ids=["not sampled", "no tracing"])
def test_what_is_not_sampled_makes_no_span_and_no_message_longer(watched: bool) -> None:
    watch = Traced(ratio=0.0)

    async def test() -> None:
        target, drafter = ScriptedTarget(), ScriptedDrafter()
        target.token_ms = 2.0
        limits = {"max_draft_tokens": 2, "draft_ahead": True}
        async with serving(watch.tracing if watched else NO_TRACING, target, drafter, **limits) as router:
            await ask_all(router, [traced(request(), 0, sampled=not watched), request(number=1)])
        steps = (ProposeRequest, DraftAheadRequest, VerifyRequest)
        sent = [message for worker in (target, drafter) for message in worker.messages if isinstance(message, steps)]
        assert len(sent) > 5
        assert {item.trace_parent for message in sent for item in message.items} == {None}

    run(test)
    assert watch.spans == []


def test_beside_a_sampled_request_others_stay_out_of_the_trace() -> None:
    watch = Traced(ratio=0.0)

    async def test() -> None:
        async with serving(watch.tracing, ScriptedTarget(), ScriptedDrafter(), max_draft_tokens=2) as router:
            await ask_all(router, [traced(request(), 0), traced(request(number=1), 1, sampled=False)])

    run(test)
    assert {span.trace_id for span in watch.spans} == {trace_id(0)}
    assert not any(span.links for span in watch.spans)
    assert_complete(watch.spans, trace_id(0), PARENT)


@pytest.mark.parametrize("most", [16, 40])
def test_a_trace_never_has_more_spans_than_allowed_and_says_what_is_left_out(most: int) -> None:
    watch = Traced(max_spans=most)

    async def test() -> None:
        async with serving(watch.tracing, ScriptedTarget(), ScriptedDrafter(), max_draft_tokens=1) as router:
            await ask(router, traced(request(max_tokens=60), 0))

    run(test)
    assert most - 8 <= len(watch.spans) <= most
    assert_complete(watch.spans, trace_id(0), PARENT)
    (sequence,) = named(watch.spans, "sequence")
    rounds = len(named(watch.spans, "verify")) + int(str(sequence.attributes["leadout.rounds_without_spans"]))
    assert rounds == sequence.attributes["leadout.verifications"]


def test_a_client_that_leaves_or_is_refused_ends_its_spans() -> None:
    watch = Traced()

    async def test() -> None:
        limits = {"max_running_sequences": 1, "max_waiting_sequences": 0}
        async with serving(watch.tracing, ScriptedTarget(delay_s=0.001), **limits) as router:
            events = router.generate(traced(request(max_tokens=200), 0))
            await anext(events)
            refused = await ask(router, traced(request(number=1), 1))
            assert refused.failure is not None and refused.failure.status == 429
            await events.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    run(test)
    left, refused = (in_trace(watch.spans, trace_id(number)) for number in range(2))
    assert named(left, "sequence")[0].attributes["leadout.outcome"] == "cancelled"
    assert not named(left, "sequence")[0].failed
    assert named(refused, "sequence")[0].attributes["error.type"] == "overloaded"
    assert named(refused, "sequence")[0].failed
    assert not named(refused, *ROUND)
    for number in range(2):
        assert_complete(watch.spans, trace_id(number), PARENT)
