"""What tracing costs: tokens per second of the embedded pair with tracing off, at 1 % and at 100 % of the requests.

`make bench BENCH=tracing` (about six minutes), `QUICK=1` for two. The three services run side by side and take turns,
so that drift of the machine meets all of them alike; their spans go to a collector in this process.
"""

import argparse
import contextlib
from collections.abc import Iterator
from statistics import median
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.collector import running_collector
from benchmarks.harness import Row, Service, report, running_service, tiny_pair_config
from benchmarks.load import SEEDED, LoadResult, completion_body, run_load
from models.corpus import held_out_prompts

SHARES: dict[str, float | None] = {"off": None, "1 %": 0.01, "100 %": 1.0}


class SpanCounter:
    """Counts the spans that a collector takes."""

    def __init__(self) -> None:
        self.spans = 0

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Count those of a message."""
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def config_for(share: float | None, endpoint: str) -> dict[str, Any]:
    """Return the shipped configuration with that share of its requests traced."""
    telemetry = {"enabled": False} if share is None else {"endpoint": endpoint, "sample_ratio": share}
    # The same prompts come again and again; whoever came later would find them cached.
    uncached = {"prefix_caching": False}
    return tiny_pair_config(telemetry=telemetry, target=uncached, drafters=uncached)


def measure(
    services: dict[str, Service], counters: dict[str, SpanCounter], repeats: int, max_tokens: int
) -> Iterator[Row]:
    """Yield rows for every concurrency; the services take turns, in another order each time."""
    prompts = held_out_prompts(16)
    for concurrency in (1, 8):
        results: dict[str, list[LoadResult]] = {name: [] for name in services}
        before = {name: counter.spans for name, counter in counters.items()}
        names = list(services)
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                bodies = [completion_body(prompt, SEEDED, True, max_tokens) for prompt in prompts]
                results[name].append(run_load(services[name], bodies, concurrency))
        plain = median(result.tokens_per_s for result in results["off"])
        for name, of_service in results.items():
            speed = median(result.tokens_per_s for result in of_service)
            yield Row(f"concurrency {concurrency}: traced {name}", speed, "tok/s", bound=plain, ratio=speed / plain)
        for name, counter in counters.items():
            requests = repeats * len(prompts)
            yield Row(
                f"concurrency {concurrency}: traced {name}, spans",
                (counter.spans - before[name]) / requests,
                "spans per request",
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        services: dict[str, Service] = {}
        counters: dict[str, SpanCounter] = {}
        for name, share in SHARES.items():
            counter = SpanCounter()
            endpoint = stack.enter_context(running_collector(counter.take))
            if share is not None:
                counters[name] = counter
            services[name] = stack.enter_context(running_service(config_for(share, endpoint)))
            warm_up = [completion_body(prompt, SEEDED, True, 16) for prompt in held_out_prompts(8)]
            run_load(services[name], warm_up, concurrency=4)
        report("tracing", list(measure(services, counters, repeats=3 if quick else 9, max_tokens=64)))


if __name__ == "__main__":
    main()
