"""The draft worker: an actor with one drafter in its own process, answering the router's messages."""

import os
import threading
from typing import Any

import ray

from workers.answering import answer
from workers.compute_threads import in_own_thread, wait_briefly
from workers.drafters.base import Drafter
from workers.drafters.registry import DrafterSpec, build_drafter
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


class DraftWorker:
    """Owns one drafter. Messages are handled one at a time, in the order they were sent."""

    def __init__(
        self, worker_id: str, name: str, spec: DrafterSpec, telemetry: TelemetryConfig = BY_ENVIRONMENT
    ) -> None:
        self._worker_id = worker_id
        self._name = name
        self._spec = spec
        self._telemetry = telemetry
        self._spans = StepSpans()
        self._drafter: Drafter | None = None
        self._one_at_a_time = threading.Lock()
        self._server: ZmqServer | None = None

    def load(self) -> WorkerRegistration:
        """Load the drafter and say what the router must know. Raises ConfigurationError."""
        show_worker_log()
        wait_briefly()
        self._spans = StepSpans(set_up_tracing(self._telemetry, "draft", self._worker_id), self._worker_id)
        self._drafter = in_own_thread(lambda: build_drafter(self._spec))
        limits = self._drafter.limits
        return WorkerRegistration(
            worker_id=self._worker_id,
            role=WorkerRole.DRAFT,
            name=self._name,
            process_ids=(os.getpid(),),
            vocabulary_size=limits.vocabulary_size,
            context_length=limits.context_length,
            block_tokens=limits.block_tokens,
            total_blocks=limits.total_blocks,
        )

    def handle(self, message: WorkerRequest) -> WorkerResponse | None:
        """Answer one message of the link protocol, whichever link brings it."""
        drafter = self._drafter
        if drafter is None:
            raise RuntimeError("the drafter is not loaded")
        with self._one_at_a_time:
            return self._spans.around(message, lambda: answer(drafter, message))

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
DraftWorkerActor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(DraftWorker)
