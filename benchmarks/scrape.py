"""A real Prometheus scrapes a running service: does every panel of the dashboards show something, and does it add up?

`make bench BENCH=scrape`, `QUICK=1` for less load. Needs `prometheus` (Debian's package) on the path. A panel's row
is how many series its query returns; the totals are held against the usage that the clients were told.
"""

import argparse
import contextlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.harness import ROOT, Row, Service, ray_metrics_address, report, running_service, tiny_pair_config
from benchmarks.load import SEEDED, completion_body, run_load
from deployments.local_cluster import free_port
from models.corpus import held_out_prompts

SCRAPE_EVERY_S = 5
WINDOW = "5m"
SETTLE_S = 25.0
"""The router publishes every 5 s, Ray exports every 10 s, and what comes last must have been scraped."""
DASHBOARDS = ROOT / "k8s" / "components" / "monitoring" / "dashboards"
TOTALS = {
    "generation_tokens": lambda usage: usage["completion_tokens"],
    "spec_decode_num_draft_tokens": lambda usage: usage["speculation"]["draft_tokens"],
    "spec_decode_num_accepted_tokens": lambda usage: usage["speculation"]["accepted_tokens"],
    "verifications": lambda usage: usage["speculation"]["verifications"],
}


class Prometheus:
    """A server that scrapes the service and Ray's export port."""

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self, expression: str) -> list[float]:
        """Return the values of an instant query. Raises httpx.HTTPStatusError for one that cannot be read."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": expression}, timeout=60.0).raise_for_status()
        return [float(series["value"][1]) for series in answer.json()["data"]["result"]]

    def is_ready(self) -> bool:
        """Whether both targets have been scraped."""
        with contextlib.suppress(httpx.HTTPError):
            return self.values("up") == [1.0, 1.0]
        return False


@contextlib.contextmanager
def prometheus(service: Service, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus on a free port until the block ends."""
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_EVERY_S}s", "scrape_timeout": f"{SCRAPE_EVERY_S}s"},
        "scrape_configs": [
            {"job_name": "service", "static_configs": [{"targets": [service.url.removeprefix("http://")]}]},
            {"job_name": "ray", "static_configs": [{"targets": [ray_metrics_address(service)]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stdout=log, stderr=log
        )
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 60.0
        while not server.is_ready():
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"Prometheus scrapes nothing:\n{(folder / 'prometheus.log').read_text()}")
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait()


def panel_queries() -> list[tuple[str, str]]:
    """Return the name and the query of every panel's every series."""
    return [
        (
            f"{path.stem}: {panel['title']}{' ' + target['legendFormat'] if len(panel['targets']) > 1 else ''}",
            target["expr"],
        )
        for path in sorted(DASHBOARDS.glob("*.json"))
        for panel in json.loads(path.read_text("utf-8"))["panels"]
        for target in panel.get("targets", ())
    ]


def load(service: Service, requests: int) -> list[dict[str, Any]]:
    """Return the usage of drafted and plain requests, a few at a time."""
    prompts = held_out_prompts(requests)
    bodies = [
        completion_body(prompt, SEEDED, speculation=index % 4 != 3, max_tokens=64)
        for index, prompt in enumerate(prompts)
    ]
    # One at a time, drafters draft ahead; many at a time, sequences are batched and wait.
    answers = run_load(service, bodies[: requests // 4], 1).answers + run_load(service, bodies, 8).answers
    return [answer["usage"] for answer in answers]


def panel_rows(server: Prometheus) -> list[Row]:
    """Return how many series each panel shows; a value that is no number counts as none."""
    rows = []
    for name, expression in panel_queries():
        query = expression.replace("$cluster", ".*").replace("$__rate_interval", WINDOW)
        shown = sum(not math.isnan(value) for value in server.values(query))
        rows.append(Row(name, shown, "series", bound=1.0))
    return rows


def total_rows(server: Prometheus, usages: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the totals of both ports beside what the clients were told."""
    rows = []
    for metric, of_usage in TOTALS.items():
        told = float(sum(map(of_usage, usages)))
        for prefix, port in (("leadout", "service's port"), ("ray_leadout", "Ray's port")):
            (counted,) = server.values(f"sum(last_over_time({prefix}_{metric}_total[{WINDOW}]))")
            rows.append(Row(f"{metric}, {port}", counted, "", bound=told, ratio=counted / told))
    return rows


def main() -> None:
    """Run the benchmark; exit status 1 if a panel is empty or a total is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    requests = 8 if parser.parse_args().quick else 64
    if shutil.which("prometheus") is None:
        sys.exit("scrape: prometheus is not installed (apt-get install prometheus)")
    # Drafts in every round: where they do not pay on this machine, panels about them would be empty.
    speculation = {"check_share": 0.5, "draft_length_policy": "fixed", "bench_drafters": False}
    config = tiny_pair_config(speculation=speculation)
    with (
        running_service(config) as service,
        tempfile.TemporaryDirectory(prefix="scrape-") as folder,
        prometheus(service, Path(folder)) as server,
    ):
        time.sleep(SETTLE_S)
        usages = load(service, requests)
        time.sleep(SETTLE_S)
        panels, totals = panel_rows(server), total_rows(server, usages)
    rows = [*totals, *panels]
    report("scrape", rows)
    empty = [row.case for row in panels if row.value < 1]
    wrong = [row.case for row in totals if row.value != row.bound]
    if empty or wrong:
        sys.exit(f"scrape: panels without data: {empty}; totals that differ from usage: {wrong}")


if __name__ == "__main__":
    main()
