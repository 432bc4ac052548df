"""The HTTP ingress as a Serve deployment: the application of http_app.py over handles to the routers."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import ray
from grpc import RpcError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.admission import FullRouterGate
from deployments.draining import Drain
from deployments.generation import GenerationService
from deployments.http_app import ServingLimits, create_app
from deployments.resuming import ResumingService
from deployments.sharded_service import ShardedService
from deployments.text import TextCodec
from workers.errors import RouterLostError, UnavailableError
from workers.messages import GenerationEvent, GenerationRequest, MetricsSnapshot, RouterStatus
from workers.telemetry.config import BY_ENVIRONMENT, TelemetryConfig
from workers.telemetry.setup import set_up_tracing

UNREACHABLE = (RayError, RayServeException, RpcError)


class RouterClient:
    """The generation service behind a Serve handle. A router that is not there is a RouterLostError, never a hang."""

    def __init__(self, router: DeploymentHandle, drain: Drain) -> None:
        self._router = router
        self._drain = drain
        # By value: events come over one gRPC stream between the replicas. By reference, each would be an object of Ray,
        # which takes several times as long.
        self._stream = router.options(stream=True, _by_reference=False)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        response = self._stream.generate.remote(request)
        try:
            async for event in self._drain.until_over(response):
                yield event
        except UNREACHABLE as error:
            raise RouterLostError(f"the router is not available: {type(error).__name__}") from error
        finally:
            response.cancel()

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`."""
        try:
            status: RouterStatus = await self._router.status.remote(with_worker_stats)
        except UNREACHABLE as error:
            raise UnavailableError("the router is not available") from error
        return status

    async def metrics(self) -> MetricsSnapshot:
        """See `GenerationService.metrics`."""
        try:
            snapshot: MetricsSnapshot = await self._router.metrics.remote()
        except UNREACHABLE as error:
            raise UnavailableError("the router is not available") from error
        return snapshot


def replica_is_stopping() -> bool:
    """Whether Serve has told this replica to stop.

    Serve drops the replica from its routes and waits for the requests in progress, but tells the deployment's own
    code nothing before they have ended (`perform_graceful_shutdown` in ray/serve/_private/replica.py, Ray 2.60).
    Where these internals are different, nothing is refused early.
    """
    with contextlib.suppress(AttributeError):
        worker = ray._private.worker.global_worker
        replica = worker.actors.get(worker.actor_id)
        return bool(replica._replica_impl._shutting_down)
    return False


class Ingress:
    """Validates, tokenises, streams and detokenises; all scheduling happens in the routers.

    The pools' handles are not used: they make Serve deploy the pools with the application.
    """

    def __init__(
        self,
        model: str,
        limits: ServingLimits,
        drain_timeout_s: float,
        routers: list[DeploymentHandle],
        pools: list[DeploymentHandle],
        telemetry: TelemetryConfig = BY_ENVIRONMENT,
    ) -> None:
        self._tracing = set_up_tracing(telemetry, "ingress")
        drain = Drain(replica_is_stopping, drain_timeout_s)
        clients = [RouterClient(router, drain) for router in routers]
        service: GenerationService = clients[0]
        if len(clients) > 1:
            names = [router.deployment_name for router in routers]
            service = ShardedService(dict(zip(names, clients, strict=True)), limits.most_running)
        service = ResumingService(service)
        if limits.most_sequences is not None:
            service = FullRouterGate(service, limits.most_sequences)
        codec = TextCodec.load(model)
        self._app = create_app(service, codec, limits, drain, names_requests=False, tracing=self._tracing)

    def __del__(self) -> None:
        # Serve calls it when the last streams of a replica have ended.
        self._tracing.flush()

    def __serve_build_asgi_app__(self) -> Any:
        return self._app
