"""What tracing costs: tokens per second of the embedded pair with tracing off, and with a share of requests traced.

`make bench BENCH=tracing` takes a quarter of an hour on two cores, `QUICK=1` six minutes. Two services run side by side
and take turns, so that drift of the machine meets both alike: one does not trace, the other traces the requests whose
client says so. Its spans go to a collector in this process.
"""

import argparse
import contextlib
import secrets
from collections.abc import Iterator
from itertools import count
from statistics import median

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.collector import running_collector
from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.load import SEEDED, LoadResult, completion_body, run_load
from models.corpus import held_out_prompts

EVERY = {"off": None, "on, no request traced": None, "1 % of requests traced": 100, "100 % of requests traced": 1}
"""Cases, and of how many requests one is traced."""
OFF = "off"


class SpanCounter:
    """Counts the spans that a collector takes."""

    def __init__(self) -> None:
        self.spans = 0

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Count those of a message."""
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def trace_headers(every: int | None, number: int) -> dict[str, str]:
    """Return what a client sends with its request number `number` if it traces one of `every`."""
    sampled = every is not None and number % every == 0
    return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-0{int(sampled)}"}


def measure(plain: Service, traced: Service, repeats: int, max_tokens: int) -> Iterator[Row]:
    """Yield rows for every concurrency; the cases take turns, in another order each time."""
    prompts = held_out_prompts(16)
    for concurrency in (1, 8):
        results: dict[str, list[LoadResult]] = {name: [] for name in EVERY}
        numbers = {name: count() for name in EVERY}
        names = list(EVERY)
        for turn in range(repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                bodies = [completion_body(prompt, SEEDED, True, max_tokens) for prompt in prompts]
                headers = [trace_headers(EVERY[name], next(numbers[name])) for _ in prompts]
                service = plain if name == OFF else traced
                results[name].append(run_load(service, bodies, concurrency, headers))
        for name, of_case in results.items():
            ratios = [mine.tokens_per_s / off.tokens_per_s for mine, off in zip(of_case, results[OFF], strict=True)]
            speed = median(result.tokens_per_s for result in of_case)
            yield Row(f"concurrency {concurrency}: tracing {name}", speed, "tok/s", ratio=median(ratios))


def spans_per_request(service: Service, counter: SpanCounter, requests: int, max_tokens: int) -> Row:
    """Count the spans of some requests, whose number says how long the traces are that the speeds belong to."""
    bodies = [completion_body(prompt, SEEDED, True, max_tokens) for prompt in held_out_prompts(requests)]
    before = counter.spans
    run_load(service, bodies, 1, [trace_headers(1, 0) for _ in bodies])
    # The last spans are sent within a second.
    run_load(service, bodies, 1, [trace_headers(None, 0) for _ in bodies])
    return Row("spans of a traced request", (counter.spans - before) / requests, "spans")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    # The same prompts come again and again; whoever came later would find them cached.
    uncached = {"prefix_caching": False}
    with contextlib.ExitStack() as stack:
        counter = SpanCounter()
        endpoint = stack.enter_context(running_collector(counter.take))
        plain, traced = [
            stack.enter_context(
                running_service(tiny_pair_config(telemetry=telemetry, target=uncached, drafters=uncached))
            )
            for telemetry in ({"enabled": False}, {"endpoint": endpoint, "sample_ratio": 0.0})
        ]
        for service in (plain, traced):
            run_load(service, [completion_body(prompt, SEEDED, True, 16) for prompt in held_out_prompts(8)], 4)
        rows = [spans_per_request(traced, counter, 8, max_tokens=64)]
        report("tracing", [*rows, *measure(plain, traced, repeats=3 if quick else 9, max_tokens=64)])


if __name__ == "__main__":
    main()
