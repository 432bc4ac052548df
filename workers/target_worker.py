"""The target worker: one rank of a tensor-parallel group in its own process; rank 0 answers the router."""

import os
import socket
import threading
from typing import Any

import ray

from workers.answering import answer
from workers.compute_threads import in_own_thread, wait_briefly
from workers.engine.config import EngineConfig
from workers.links.zmq_server import ZmqServer
from workers.log_lines import show_worker_log
from workers.messages import (
    LinkAddress,
    WorkerRegistration,
    WorkerRequest,
    WorkerResponse,
    WorkerRole,
)
from workers.telemetry.config import BY_ENVIRONMENT, TelemetryConfig
from workers.telemetry.setup import set_up_tracing
from workers.telemetry.steps import StepSpans


class TargetWorker:
    """Owns one rank's share of the target. Messages are handled one at a time, in the order they were sent."""

    def __init__(
        self,
        worker_id: str,
        name: str,
        config: EngineConfig,
        rank: int,
        telemetry: TelemetryConfig = BY_ENVIRONMENT,
    ) -> None:
        self._worker_id = worker_id
        self._name = name
        self._config = config
        self._rank = rank
        self._telemetry = telemetry
        self._spans = StepSpans()
        self._one_at_a_time = threading.Lock()
        self._server: ZmqServer | None = None

    def reserve_address(self) -> tuple[str, int]:
        """Return this node's address and a free port, where the ranks of the group will meet."""
        address: str = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def load(self, meeting_point: tuple[str, int], timeout_s: float) -> WorkerRegistration:
        """Load this rank's share, together with all other ranks. Raises ConfigurationError."""
        show_worker_log()
        wait_briefly()
        if self._rank == 0:
            self._spans = StepSpans(set_up_tracing(self._telemetry, "target", self._worker_id), self._worker_id)
        # Imported here so that the process is up, and visible, before torch is.
        from workers.emulated.stretched import stretched_target
        from workers.engine.engine import Engine
        from workers.engine.tensor_parallel import TensorParallelRank
        from workers.engine.verifier import Verifier

        size = self._config.tensor_parallel_size

        def load() -> Engine:
            rank = TensorParallelRank(self._rank, size, *meeting_point, timeout_s) if size > 1 else None
            return Engine.load(self._config, rank)

        self._engine = in_own_thread(load)
        self._verifier = stretched_target(Verifier(self._engine), self._config.emulated)
        return WorkerRegistration(
            worker_id=self._worker_id,
            role=WorkerRole.TARGET,
            name=self._name,
            process_ids=(os.getpid(),),
            vocabulary_size=self._engine.vocabulary_size,
            context_length=self._engine.context_length,
            block_tokens=self._engine.block_tokens,
            total_blocks=self._engine.total_blocks,
        )

    def follow(self) -> None:
        """Run rank 0's steps on this rank until the group stops. Raises LinkClosedError when a peer dies."""
        from workers.engine.tensor_parallel import follow

        follow(self._engine)

    def handle(self, message: WorkerRequest) -> WorkerResponse | None:
        """Answer one message of the link protocol, whichever link brings it (rank 0 only)."""
        with self._one_at_a_time:
            return self._spans.around(message, lambda: answer(self._verifier, message))

    @ray.method(concurrency_group="control")
    def open_link(self, router_public_key: bytes) -> LinkAddress:
        """Let a router send messages over ZeroMQ, and say where; at once, also while a step runs."""
        if self._server is None:
            self._server = ZmqServer(ray.util.get_node_ip_address(), self.handle)
        return self._server.admit(router_public_key)

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer at once, also while a step runs."""


# Never restarted or retried by Ray: a fresh process has other KV, and only the router may send a message again.
TargetWorkerActor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(TargetWorker)
