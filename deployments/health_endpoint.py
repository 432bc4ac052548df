"""GET /health and GET /ready: whether the service lives, and whether a request sent now would be answered."""

from starlette.responses import JSONResponse, Response

from deployments.asking_router import ask_router
from deployments.draining import DRAINING_MESSAGE, Drain, DrainingError
from deployments.generation import GenerationService
from workers.errors import RequestError, UnavailableError
from workers.messages import RouterStatus

PROBE_TIMEOUT_S = 2.0


class LoadingError(UnavailableError):
    """No target has registered yet."""

    code = "loading"


class NoTargetError(UnavailableError):
    """Targets have registered, and none can answer now."""

    code = "no_target"


async def router_status(
    service: GenerationService, timeout_s: float = PROBE_TIMEOUT_S, with_worker_stats: bool = False
) -> RouterStatus:
    """Return the router's status; UnavailableError if there is none within `timeout_s`."""
    return await ask_router(service.status(with_worker_stats), timeout_s)


def why_not_alive(status: RouterStatus) -> RequestError | None:
    """Return what keeps every target from answering; None if one can."""
    if status.can_answer:
        return None
    if status.loading:
        return LoadingError("No target is registered with the router yet.")
    if any(worker.silent for worker in status.workers):
        return NoTargetError("No target is alive: nothing was heard lately of those that are registered.")
    return NoTargetError("No target is registered with the router.")


def why_not_ready(status: RouterStatus) -> RequestError | None:
    """Return why a request sent now would not be answered; None if it would."""
    if status.draining:
        return DrainingError(DRAINING_MESSAGE)
    if (error := why_not_alive(status)) is not None:
        return error
    return None if status.takes_requests else DrainingError("Every target is being stopped.")


class HealthEndpoint:
    """Both probes ask the router, which knows from heartbeats, and so never wait for a worker."""

    def __init__(self, service: GenerationService, drain: Drain) -> None:
        self._service = service
        self._drain = drain

    async def health(self) -> Response:
        """GET /health: whether a target can answer. Stays 200 while the service drains."""
        _raise(why_not_alive(await router_status(self._service)))
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: whether a request sent now would be answered."""
        if self._drain.has_begun():
            raise DrainingError(DRAINING_MESSAGE)
        _raise(why_not_ready(await router_status(self._service)))
        return JSONResponse({"status": "ready"})


def _raise(error: RequestError | None) -> None:
    if error is not None:
        raise error
