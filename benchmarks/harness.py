"""What benchmarks and end-to-end tests share: a service in its own processes, requests to it, tables of results."""

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from deployments.local_cluster import free_port

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300.0
DRAIN_PATIENCE_S = 10.0
STOP_TIMEOUT_S = 60.0
PLAIN_WIDTH = 130


# --- a service in its own processes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Service:
    """A running `leadout serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, timeout_s: float = 300.0, **body: Any) -> dict[str, Any]:
        """Return the JSON answer of one completion request; raises httpx.HTTPStatusError on an error status."""
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)
        answer.raise_for_status()
        return dict(answer.json())

    def status(self) -> dict[str, Any]:
        """Return GET /status."""
        return dict(httpx.get(f"{self.url}/status", timeout=30.0).raise_for_status().json())


def tiny_pair_config(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the shipped Serve config with the keys of `sections` (target, router, ...) replaced inside its args."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "tiny-code.yaml").read_text())
    arguments = config["applications"][0]["args"]
    for name, values in sections.items():
        if name == "drafters":
            arguments["drafters"] = [drafter | values for drafter in arguments["drafters"]]
        else:
            arguments[name] = arguments.get(name, {}) | values
    return config


@contextlib.contextmanager
def running_service(config: dict[str, Any], with_drafters: bool = True) -> Iterator[Service]:
    """Run `leadout serve` with `config` until the block ends, with a Ray of its own; leave no process behind.

    The block begins when /ready answers, which takes a target, and unless told otherwise when all drafters are there.
    """
    # Ray puts sockets below this folder, whose paths may not exceed 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="lo-", dir="/tmp"))
    path, log, port = folder / "serve.yaml", folder / "serve.log", free_port()
    path.write_text(yaml.safe_dump(config))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", "serve", str(path), "--port", str(port)],
            cwd=ROOT,
            env=os.environ | {"RAY_TMPDIR": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    service = Service(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_ready(service)
        if with_drafters:
            _wait_for_drafters(service, config["applications"][0]["args"]["drafters"])
        yield service
    finally:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def ray_metrics_address(service: Service) -> str:
    """Return host and port of the export port of the service's Ray, where Prometheus finds its metrics."""
    (told,) = service.log.parent.glob("ray/session_latest/metrics_export_port_*")
    return f"127.0.0.1:{told.read_text().strip()}"


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a `leadout serve` as Ctrl-C does, twice if requests keep it; return its exit status.

    Kills its session if it does not listen.
    """
    for patience_s in (DRAIN_PATIENCE_S, STOP_TIMEOUT_S):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _wait_until_ready(service: Service) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if service.process.poll() is not None:
            raise RuntimeError(f"leadout serve ended:\n{service.log.read_text()}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{service.url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise RuntimeError(f"leadout serve was not ready after {START_TIMEOUT_S:g} s:\n{service.log.read_text()}")


def _wait_for_drafters(service: Service, sections: list[dict[str, Any]]) -> None:
    expected = sum(section.get("replicas", 1) for section in sections)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        roles = [entry["registration"]["role"] for entry in service.status()["workers"]]
        if roles.count("draft") >= expected:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{expected} drafters were not there after {START_TIMEOUT_S:g} s:\n{service.log.read_text()}")


# --- results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value. `bound` is what it is held against and `ratio` the quotient, where there is one."""

    case: str
    value: float
    unit: str
    bound: float | None = None
    ratio: float | None = None


def report(name: str, rows: Sequence[Row]) -> None:
    """Print a table and write `benchmarks/results/<name>.json`."""
    table = Table("case", "value", "unit", "bound", "ratio", title=f"{name}  ({machine()})")
    for row in rows:
        table.add_row(row.case, f"{row.value:,.3f}", row.unit, _shown(row.bound), _shown(row.ratio))
    # A pipe has no width of its own, and a wrapped table cannot be read.
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(table)
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "commit": commit(),
        "machine": machine(),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_portable, sys.argv[1:])]),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _portable(argument: str) -> str:
    """Where a folder is on this machine says nothing to others; its name does."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}"


def commit() -> str:
    """Return the commit that is measured, with a mark if the working tree differs from it."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"


def machine() -> str:
    """Return a short description of this machine, without its name."""
    return f"{platform.machine()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}"
