"""What tracing costs in CPU time: the embedded pair in one process, tracing off and with a share of requests traced.

`make bench BENCH=tracing_cpu`, `QUICK=1` for fewer repeats. Router, drafter and target share this process with the
thread that exports, so all that tracing costs them is in its CPU time, which other programs hardly disturb; a collector
in a process of its own takes the spans. `make bench BENCH=tracing` measures the same in a real service, by the clock.
"""

import argparse
import asyncio
import multiprocessing
import secrets
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection
from statistics import median

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.collector import running_collector
from benchmarks.harness import ROOT, Row, report
from deployments.in_process import answer_all
from deployments.text import TextCodec
from models.corpus import held_out_prompts
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.messages import GenerationRequest, SamplingParams, StopConditions
from workers.router.config import RouterConfig
from workers.telemetry.config import TelemetryConfig
from workers.telemetry.setup import set_up_tracing
from workers.telemetry.tracing import NO_TRACING, Tracing

PAIR = ROOT / "models" / "tiny-code"
CONFIG = RouterConfig(max_draft_tokens=4, draft_length_policy="goodput")
EVERY = {"off": None, "1 % of requests traced": 100, "100 % of requests traced": 1}
"""Cases, and of how many requests one is traced."""


def collect(connection: Connection) -> None:
    """Run a collector; tell where it listens, and when told to stop how many spans came."""
    spans = 0

    def take(request: ExportTraceServiceRequest) -> None:
        nonlocal spans
        spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)

    with running_collector(take) as endpoint:
        connection.send(endpoint)
        connection.recv()
    connection.send(spans)


def requests_of(
    codec: TextCodec, prompts: list[str], every: int | None, numbers: Iterator[int]
) -> list[GenerationRequest]:
    """Return a request for each prompt, of which one in `every` is traced."""
    requests = []
    for prompt in prompts:
        number = next(numbers)
        sampled = every is not None and number % every == 0
        parent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-0{int(sampled)}"
        # A salt of its own: nobody finds cached what another case has read.
        request = GenerationRequest(
            f"request-{number}",
            codec.encode(prompt),
            SamplingParams(temperature=0.8, top_p=0.95, seed=number % len(prompts)),
            StopConditions(max_tokens=64),
            trace_context={"traceparent": parent},
            cache_salt=secrets.token_hex(8),
        )
        requests.append(request)
    return requests


def measure(tracing: Tracing, repeats: int, at_once: int) -> Iterator[Row]:
    """Yield the tokens per second of CPU time of each case; they take turns, in another order each time."""
    codec = TextCodec.load(str(PAIR / "target"))
    target, drafter = (
        Engine.load(EngineConfig(str(PAIR / part), "float32", "cpu", 0.25, threads=1)) for part in ("target", "draft")
    )
    prompts, names = held_out_prompts(at_once), list(EVERY)
    numbers = {name: count() for name in names}
    speeds: dict[str, list[float]] = {name: [] for name in names}
    # The first turn warms up and is not counted.
    for turn in range(repeats + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            requests = requests_of(codec, prompts, EVERY[name], numbers[name])
            used = NO_TRACING if EVERY[name] is None else tracing
            began = time.process_time()
            usages = asyncio.run(answer_all(target, drafter, codec, CONFIG, requests, used))
            # Closing the router has exported all spans.
            spent = time.process_time() - began
            if turn:
                speeds[name].append(sum(usage.committed_tokens for usage in usages) / spent)
    for name in names:
        ratios = [mine / off for mine, off in zip(speeds[name], speeds["off"], strict=True)]
        yield Row(f"{at_once} at once: tracing {name}", median(speeds[name]), "tok/CPU s", ratio=median(ratios))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    repeats = 6 if parser.parse_args().quick else 18
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,), daemon=True)
    process.start()
    tracing = set_up_tracing(TelemetryConfig(endpoint=ours.recv(), sample_ratio=0.0), "bench", environment={})
    rows = [row for at_once in (1, 8) for row in measure(tracing, repeats, at_once)]
    ours.send("stop")
    report("tracing_cpu", [*rows, Row("spans that came", ours.recv(), "spans")])


if __name__ == "__main__":
    main()
