"""The HTTP ingress as a Serve deployment: the application of http_app.py over a handle to the router."""

from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.http_app import ServingLimits, create_app
from deployments.text import TextCodec
from workers.errors import UnavailableError
from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest, RouterStatus
from workers.telemetry.config import BY_ENVIRONMENT, TelemetryConfig
from workers.telemetry.setup import set_up_tracing


class RouterClient:
    """The generation service behind a Serve handle. A router that cannot be reached is a 503, never a hang."""

    def __init__(self, router: DeploymentHandle) -> None:
        self._router = router
        self._stream = router.options(stream=True)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See `GenerationService.generate`."""
        response = self._stream.generate.remote(request)
        try:
            async for event in response:
                yield event
        except (RayError, RayServeException) as error:
            yield GenerationFailed(503, "service_unavailable", f"the router is not available: {type(error).__name__}")
        finally:
            response.cancel()

    async def status(self, with_worker_stats: bool = False) -> RouterStatus:
        """See `GenerationService.status`."""
        try:
            status: RouterStatus = await self._router.status.remote(with_worker_stats)
        except (RayError, RayServeException) as error:
            raise UnavailableError("the router is not available") from error
        return status


class Ingress:
    """Validates, tokenises, streams and detokenises; all scheduling happens in the router.

    The pools' handles are not used: they make Serve deploy the pools with the application.
    """

    def __init__(
        self,
        model: str,
        limits: ServingLimits,
        router: DeploymentHandle,
        pools: list[DeploymentHandle],
        telemetry: TelemetryConfig = BY_ENVIRONMENT,
    ) -> None:
        self._tracing = set_up_tracing(telemetry, "ingress")
        self._app = create_app(RouterClient(router), TextCodec.load(model), limits, self._tracing)

    def __del__(self) -> None:
        # Serve calls it when the last streams of a replica have ended.
        self._tracing.flush()

    def __serve_build_asgi_app__(self) -> Any:
        return self._app
