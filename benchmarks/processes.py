"""Memory and CPU time of a service's processes, by what they do."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import psutil

# What a process calls itself contains this; the first that fits names its role.
ROLES = {
    "Proxy": "HTTP proxy",
    "Replica:leadout:Ingress": "ingress",
    "Replica:leadout:Router": "router",
    "TargetWorker": "target worker",
    "DraftWorker": "draft worker",
    "Replica:leadout:TargetPool": "pool supervisors",
    "Replica:leadout:DraftPool": "pool supervisors",
    "ServeController": "Serve controller",
    "ray::IDLE": "idle Ray workers",
    "deployments.cli": "leadout serve",
    "benchmarks.": "leadout serve",
}
REST = "Ray itself"
MIB = 2**20


def rss_mib(root_pid: int) -> Counter[str]:
    """Return the resident memory of `root_pid` and its descendants by role, in MiB; "all" is their sum."""
    memory: Counter[str] = Counter()
    for role, process in _processes(root_pid):
        with contextlib.suppress(psutil.Error):
            memory[role] += process.memory_info().rss / MIB  # type: ignore[assignment]
    memory["all"] = sum(memory.values())
    return memory


def cpu_ms(root_pid: int) -> Counter[str]:
    """Return the CPU time so far of `root_pid` and its descendants by role, in milliseconds."""
    spent: Counter[str] = Counter()
    for role, process in _processes(root_pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            spent[role] += 1e3 * (times.user + times.system)  # type: ignore[assignment]
    return spent


def _processes(root_pid: int) -> Iterator[tuple[str, psutil.Process]]:
    root = psutil.Process(root_pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title:
                yield next((role for part, role in ROLES.items() if part in title), REST), process
