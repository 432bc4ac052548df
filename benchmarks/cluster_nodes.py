"""Several Ray nodes on one machine, each with labels and GPUs that it only claims to have."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.config import parse_config
from deployments.local_cluster import RAY_SETTINGS, deploy, free_port, wait_for_drafters, wait_until_ready
from deployments.preflight import check_deployment, resolve_models

HEAD_LABELS = {"leadout/role": "head"}
OBJECT_STORE_BYTES = 80 * 2**20


class Nodes:
    """The nodes that run, by name. Each is a raylet of its own, the parent of all workers that Ray puts on it."""

    def __init__(self, cluster: Any, starter: Executor) -> None:
        self._cluster = cluster
        self._starter = starter
        self._nodes: dict[str, Any] = {}

    def add(self, name: str, cpus: int, gpus: int, labels: Mapping[str, str]) -> None:
        """Start a node and wait until the others know it."""
        self._nodes[name] = self._starter.submit(self._start, cpus, gpus, dict(labels)).result()

    def _start(self, cpus: int, gpus: int, labels: dict[str, str]) -> Any:
        # Ray would set a handler for SIGTERM, which only the main thread may.
        with patch("ray._private.utils.set_sigterm_handler"):
            return self._cluster.add_node(
                num_cpus=cpus, num_gpus=gpus, labels=labels, object_store_memory=OBJECT_STORE_BYTES
            )

    def kill(self, name: str) -> None:
        """End a node as a machine ends that loses its power: with all its processes, and without a word."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def node_of(self, process_id: int) -> str | None:
        """Return the node on which a worker process runs; None if it is gone or elsewhere."""
        raylets = {node.all_processes["raylet"][0].process.pid: name for name, node in self._nodes.items()}
        try:
            return raylets.get(psutil.Process(process_id).ppid())
        except psutil.NoSuchProcess:
            return None


@contextlib.contextmanager
def several_nodes() -> Iterator[Nodes]:
    """Start a head node with `HEAD_LABELS` and no GPU, and connect to it; end all nodes with the block.

    Ray gives a node half a minute to start, which a very busy machine may exceed.
    """
    # Ray puts sockets below this folder, whose paths may not exceed 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="lo-", dir="/tmp"))
    os.environ["RAY_TMPDIR"] = str(folder)
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    cluster = None
    # A node ends with the thread that began it, so one thread begins them all, and lives as long as they.
    starter = ThreadPoolExecutor(1)
    try:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "labels": HEAD_LABELS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            },
        )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield Nodes(cluster, starter)
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()
        starter.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving_on_nodes(arguments: dict[str, Any], drafters: int, patience_s: float) -> Iterator[str]:
    """Serve on the nodes that run, with these arguments of the application; yield the URL.

    By then the service is ready and has so many drafters. RuntimeError if that takes longer than `patience_s`.
    """
    from deployments.app import wire

    config = resolve_models(parse_config(arguments))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    deploy(wire(config, check_deployment(config)), "127.0.0.1", port)
    try:
        wait_until_ready(url, patience_s)
        wait_for_drafters(url, drafters, patience_s)
        yield url
    finally:
        serve.shutdown()
