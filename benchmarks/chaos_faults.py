"""Bringing planned faults about in a running service: signals to its processes, lost messages, lost nodes."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from benchmarks.chaos_plan import Fault, FaultKind
from workers.links.faulty import INJECTION_VARIABLE

MESSAGE_FAULTS: Mapping[FaultKind, Mapping[str, float]] = {
    FaultKind.MESSAGES_DROPPED: {"drop": 0.05},
    FaultKind.MESSAGES_DELAYED: {"delay": 0.3, "delay_s": 0.3},
    FaultKind.MESSAGES_DOUBLED: {"double": 0.5},
}
"""What happens to which share of the messages while such a fault lasts."""
KILLED = {FaultKind.DRAFTER_KILLED, FaultKind.TARGET_KILLED, FaultKind.RANK_KILLED, FaultKind.ROUTER_KILLED}
RANKS = {FaultKind.RANK_KILLED, FaultKind.RANK_STOPPED}
ROUTERS = {FaultKind.ROUTER_KILLED, FaultKind.ROUTER_STOPPED}
DRAFTERS = {FaultKind.DRAFTER_KILLED, FaultKind.DRAFTER_STOPPED}


class LosableNodes(Protocol):
    """Nodes of which one may be removed, and come back."""

    def losable(self) -> list[str]:
        """Return the names of the nodes that may be removed now."""
        ...

    def remove(self, name: str) -> None:
        """End a node with everything on it."""
        ...

    def bring_back(self, name: str) -> None:
        """Start a node like the one that was removed."""
        ...

    def bring_back_all(self) -> None:
        """Start all nodes that were removed."""
        ...

    def node_of(self, process_id: int) -> str | None:
        """Return the node on which a process runs; None if it is gone or elsewhere."""
        ...


def worker_processes(url: str, role: str) -> list[list[int]]:
    """Return the process ids of each worker of `role`, rank by rank. httpx.HTTPError if nobody answers."""
    workers = httpx.get(f"{url}/status", timeout=5.0).raise_for_status().json()["workers"]
    registrations = [entry["registration"] for entry in workers]
    return [list(each["process_ids"]) for each in registrations if each["role"] == role]


def router_processes(root_pid: int) -> list[int]:
    """Return the process ids of the routers among the descendants of `root_pid`."""
    found = []
    for process in psutil.Process(root_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("ServeReplica:leadout:Router" in part for part in process.cmdline()):
                found.append(process.pid)
    return found


@dataclass(slots=True)
class FaultInjection:
    """Brings faults about in the service at `url`, whose processes descend from `root_pid`.

    `happened` are the faults that came about: when, in seconds of the monotonic clock, of which kind, and for how long.
    `missed` are those that found nothing to befall.
    """

    url: str
    root_pid: int
    link_faults: Path
    seed: int = 0
    nodes: LosableNodes | None = None
    happened: list[tuple[float, str, float]] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    _passing: list[threading.Thread] = field(default_factory=list)

    def befall(self, fault: Fault) -> None:
        """Bring a fault about. What passes by itself does so in a thread of its own."""
        if fault.kind in MESSAGE_FAULTS:
            self._note(fault)
            self._disturb_messages(fault)
        elif fault.kind is FaultKind.NODE_REMOVED:
            self._remove_node(fault)
        else:
            self._signal(fault)

    def finish(self) -> None:
        """Wait until what passes has passed."""
        for thread in self._passing:
            thread.join()

    def _note(self, fault: Fault) -> None:
        self.happened.append((time.monotonic(), str(fault.kind), 0.0 if fault.kind in KILLED else fault.lasts_s))

    def _signal(self, fault: Fault) -> None:
        chosen = fault.chosen([str(pid) for pid in self._victims(fault.kind)])
        if chosen is None:
            self.missed.append(fault)
            return
        self._note(fault)
        pid = int(chosen)
        if fault.kind in KILLED:
            _send(pid, signal.SIGKILL)
            return
        _send(pid, signal.SIGSTOP)
        self._later(fault.lasts_s, lambda: _send(pid, signal.SIGCONT))

    def _victims(self, kind: FaultKind) -> list[int]:
        if kind in ROUTERS:
            return router_processes(self.root_pid)
        try:
            workers = worker_processes(self.url, "draft" if kind in DRAFTERS else "target")
        except (httpx.HTTPError, KeyError):
            return []
        return [pid for ranks in workers for pid in (ranks[1:] if kind in RANKS else ranks[:1])]

    def _disturb_messages(self, fault: Fault) -> None:
        content = {**MESSAGE_FAULTS[fault.kind], "seed": self.seed, "until": time.time() + fault.lasts_s}
        # Whole or not at all: the router reads it at any time.
        written = self.link_faults.with_suffix(".new")
        written.write_text(json.dumps(content))
        written.replace(self.link_faults)

    def _remove_node(self, fault: Fault) -> None:
        nodes = self.nodes
        chosen = None if nodes is None else fault.chosen(nodes.losable())
        if nodes is None or chosen is None:
            self.missed.append(fault)
            return
        self._note(fault)
        nodes.remove(chosen)
        self._later(fault.lasts_s, lambda: nodes.bring_back(chosen))

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        def wait_and_do() -> None:
            time.sleep(seconds)
            what()

        thread = threading.Thread(target=wait_and_do)
        self._passing.append(thread)
        thread.start()


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


@contextlib.contextmanager
def link_faults_file(folder: Path) -> Iterator[Path]:
    """Let services that are started in the block take the faults of their messages from the file."""
    path = folder / "link-faults.json"
    os.environ[INJECTION_VARIABLE] = str(path)
    try:
        yield path
    finally:
        del os.environ[INJECTION_VARIABLE]
