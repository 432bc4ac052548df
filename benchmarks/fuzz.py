"""Requests made from the served description, against the whole application in one process with tiny real models.

`make bench BENCH=fuzz` sends 5,000 of them (under ten minutes), `QUICK=1` 300. Each is allowed by the description or,
as often, is not. No answer may be a server error other than those that docs/api.md lists, every error has OpenAI's
shape, and afterwards the service lives and all KV is free. Exits with 1 otherwise.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

from benchmarks.harness import Row, report
from deployments.text import TextCodec
from tests.deployments.fuzzing import FuzzedRequest, check, fuzzed_requests, send
from tests.in_process import InProcessService, application, load, save_byte_llama, save_drafters
from workers.router.config import RouterConfig

REQUESTS, FEW_REQUESTS = 5_000, 300
MADE = {429: "overloaded", 500: "sequence_fault", 503: "service_unavailable", 504: "timeout"}


def rows_of(client: TestClient, requests: int) -> list[Row]:
    """Send the requests; the rows count the answers by status and say how long the slowest took."""
    statuses: Counter[int] = Counter()
    took_s: list[float] = []

    @given(fuzzed_requests())
    @settings(max_examples=requests, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def try_one(request: FuzzedRequest) -> None:
        began = time.perf_counter()
        response = send(client, request)
        took_s.append(time.perf_counter() - began)
        statuses[response.status_code] += 1
        check(request, response, MADE)

    try_one()
    rows = [Row(f"answers with status {status}", count, "answers") for status, count in sorted(statuses.items())]
    return [Row("requests", len(took_s), "requests", bound=requests), *rows, Row("slowest", max(took_s), "s")]


def left_over(client: TestClient) -> list[Row]:
    """Return what is still held after the last request."""
    workers = client.get("/status").json()["workers"]
    stats = [worker["stats"] for worker in workers]
    held = sum(each["total_blocks"] - each["free_blocks"] for each in stats)
    return [Row("KV blocks still held", held, "blocks", bound=0), Row("health", client.get("/health").status_code, "")]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    requests = FEW_REQUESTS if parser.parse_args().quick else REQUESTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        noisy = save_drafters(save_byte_llama(folder), folder)["noisy"]
        codec = TextCodec.load(str(folder))
        service = InProcessService(load(folder), {"scripted": load(noisy)}, codec, RouterConfig(max_draft_tokens=8))
        with TestClient(application(service, codec), raise_server_exceptions=False) as client:
            rows = [*rows_of(client, requests), *left_over(client)]
    report("fuzz", rows)
    left, health = rows[-2:]
    if left.value or health.value != 200:
        raise SystemExit("something is left, or the service does not live")


if __name__ == "__main__":
    main()
