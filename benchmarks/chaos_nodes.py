"""A service over several Ray nodes on one machine, each of which may be removed and come back but the head."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.cluster_nodes import HEAD_LABELS, Nodes, serving_on_nodes, several_nodes
from benchmarks.harness import tiny_pair_config

ROLE = "leadout/role"
PATIENCE_S = 300.0


class RemovableNodes:
    """The nodes of targets and drafters, by name; each can hold the workers of one replica."""

    def __init__(self, nodes: Nodes, ranks: int, workers: int) -> None:
        self._nodes = nodes
        self._ranks = ranks
        self._all = [f"{role}-{number}" for role in ("target", "draft") for number in range(workers)]
        self._there: set[str] = set()
        # Nodes are removed and come back on different threads.
        self._lock = threading.Lock()
        self.bring_back_all()

    def losable(self) -> list[str]:
        """Return the nodes that are there."""
        with self._lock:
            return sorted(self._there)

    def remove(self, name: str) -> None:
        """End a node with everything on it, as a machine ends that loses its power."""
        with self._lock:
            self._there.discard(name)
            self._nodes.kill(name)

    def bring_back(self, name: str) -> None:
        """Start the node, anew if it was removed."""
        role = name.rpartition("-")[0]
        with self._lock:
            self._nodes.add(name, self._ranks if role == "target" else 1, 0, {ROLE: role})
            self._there.add(name)

    def bring_back_all(self) -> None:
        """Start all nodes that were removed."""
        for name in self._all:
            if name not in self._there:
                self.bring_back(name)

    def node_of(self, process_id: int) -> str | None:
        """Return the node on which a process runs; None if it is gone or elsewhere."""
        return self._nodes.node_of(process_id)


@contextlib.contextmanager
def node_service(sections: dict[str, Any], ranks: int, workers: int) -> Iterator[tuple[str, RemovableNodes]]:
    """Serve with `sections` on a node per worker; router and ingress stay on the head, which outlives the others."""
    placed = {
        "target": sections["target"] | {"node_labels": {ROLE: "target"}},
        "drafters": sections["drafters"] | {"node_labels": {ROLE: "draft"}},
        "router": sections["router"] | {"node_labels": HEAD_LABELS},
        "ingress": sections["ingress"] | {"node_labels": HEAD_LABELS},
    }
    arguments = tiny_pair_config(**placed)["applications"][0]["args"]
    with several_nodes() as nodes:
        removable = RemovableNodes(nodes, ranks, workers)
        with serving_on_nodes(dict(arguments), workers, PATIENCE_S) as url:
            yield url, removable
