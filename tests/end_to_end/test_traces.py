"""Traces of a real service, as a real collector gets them from its processes."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.harness import Service
from tests.end_to_end.collector import Collector
from tests.end_to_end.requests import SEEDED, TIMEOUT, body, stream
from tests.fakes.tracing import Shown, assert_complete, assert_tiled, in_trace, named
from tests.limits import HANG_S

PARENT = "b7ad6b7169203331"


def streamed(
    service: Service, prompts: Sequence[str], traces: Sequence[str], max_tokens: int, kill_drafter: bool = False
) -> None:
    """Stream a request in each of the traces, all at once; if asked to, kill the drafter behind the first tokens."""
    doomed = drafter_processes(service.status()) if kill_drafter else []

    async def read(prompt: str, trace: str) -> None:
        headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT, headers=headers) as client:
            async for _ in stream(client, body(prompt, SEEDED | {"ignore_eos": True}, max_tokens=max_tokens)):
                while doomed:
                    os.kill(doomed.pop(), signal.SIGKILL)

    async def run() -> None:
        await asyncio.gather(*map(read, prompts, traces))

    asyncio.run(run())


def drafter_processes(status: dict[str, Any]) -> list[int]:
    """The process ids of the drafters in service."""
    workers = [worker["registration"] for worker in status["workers"]]
    return [process_id for worker in workers if worker["role"] == "draft" for process_id in worker["process_ids"]]


def processes_of(spans: Sequence[Shown]) -> set[str]:
    """The names of the processes that sent the spans."""
    return {str(span.attributes["service.name"]) for span in spans}


def arrived(collector: Collector, traces: Sequence[str], processes: int = 1) -> list[Shown]:
    """The spans of the traces, once so many processes have sent some of each, and no more of them come."""
    deadline, known = time.monotonic() + HANG_S, -1
    while time.monotonic() < deadline:
        spans = [span for span in collector.spans if span.trace_id in traces]
        requests = [span for span in spans if span.name.startswith("text_completion")]
        whole = all(len(processes_of(in_trace(spans, trace))) >= processes for trace in traces)
        if whole and len(requests) == len(traces) and len(spans) == known:
            return spans
        known = len(spans)
        time.sleep(1.5)
    raise AssertionError(f"of {len(traces)} traces came {known} spans, of {processes_of(spans)}")


def test_two_interleaved_requests_arrive_as_complete_traces_from_all_four_processes(
    service: Service, collector: Collector, prompts: list[str]
) -> None:
    traces = ["11111111111111111111111111111111", "22222222222222222222222222222222"]
    streamed(service, prompts[:2], traces, max_tokens=120)
    spans = arrived(collector, traces, processes=4)
    for trace in traces:
        mine = in_trace(spans, trace)
        assert_complete(spans, trace, PARENT)
        assert_tiled(spans, trace, least_share=0.0)
        assert processes_of(mine) == {f"leadout-{role}" for role in ("ingress", "router", "draft", "target")}
        commits = named(mine, "commit")
        assert sum(int(str(span.attributes["leadout.committed_tokens"])) for span in commits) == 120
        rounds = {span.span_id for span in named(spans, "verify") if span.trace_id != trace}
        links = {link for span in named(mine, "verify.step") for link in span.links}
        assert links and {span_id for _, span_id in links} <= rounds


def test_a_trace_stays_whole_across_the_death_of_the_drafter(
    service: Service, collector: Collector, prompts: list[str]
) -> None:
    trace = "33333333333333333333333333333333"
    streamed(service, prompts[2:3], [trace], max_tokens=480, kill_drafter=True)
    spans = arrived(collector, [trace])
    assert_complete(spans, trace, PARENT)
    assert_tiled(spans, trace, least_share=0.0)
    (sequence,) = named(spans, "sequence")
    assert {"fallback", "first_token"} <= set(sequence.events)
    assert not sequence.failed
    # Whoever comes next wants it back.
    deadline = time.monotonic() + HANG_S
    while not drafter_processes(service.status()) and time.monotonic() < deadline:
        time.sleep(0.2)


def test_requests_of_clients_that_do_not_trace_leave_no_spans(
    service: Service, collector: Collector, prompts: list[str]
) -> None:
    before = {span.trace_id for span in collector.spans}
    service.complete(**body(prompts[0], SEEDED, max_tokens=8))
    time.sleep(1.5)
    assert {span.trace_id for span in collector.spans} == before
