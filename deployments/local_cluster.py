"""One Ray and one Serve on this machine, for as long as a `leadout serve` runs."""

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.config import LeadoutConfig
from workers.errors import ConfigurationError

APPLICATION_NAME = "leadout"
ROUTER_NAME = "Router"
"""The router's deployment; where there are several, each has a number behind it."""
# Token ids and text are all that crosses processes: Ray's minimum is plenty.
OBJECT_STORE_BYTES = 100 * 1024 * 1024
READY_POLL_S = 0.2
CLOSE_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.2
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Between Serve's proxy and the ingress, too, the parts of an answer come over gRPC rather than as objects of Ray.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # What Serve does for a request, and what the application does, share one event loop in each process. Between two
    # loops every part of an answer changes threads twice, which takes longer than the part itself.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray would put its workers, which are the whole service, behind everything else on the machine (nice 15).
    "RAY_worker_niceness": "0",
}


def check_port(host: str, port: int) -> None:
    """Raise ConfigurationError when `port` is taken, before anything is started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def logical_cpus(config: LeadoutConfig) -> int:
    """Return the CPUs to tell Ray of: what the workers ask for, even on a smaller machine."""
    target = config.target
    wanted = target.num_cpus * target.tensor_parallel_size * target.most_replicas
    wanted += sum(drafter.num_cpus * drafter.most_replicas for drafter in config.drafters)
    return max(math.ceil(wanted), os.cpu_count() or 1)


@contextlib.contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Start a private Ray; on leaving, stop Serve and every process that was started."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        # Serve ends its controller while Ray still asks it things, and Ray prints each failure to stdout.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            with contextlib.suppress(Exception):
                _end_streams()
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()


def _end_streams() -> None:
    """Let routers tell their clients that the service ends, rather than let them wait for workers that are gone."""
    for answer in [router.close.remote() for router in _routers()]:
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            answer.result(timeout_s=CLOSE_TIMEOUT_S)


def wait_until_drained(timeout_s: float, announce: Callable[[int], None]) -> int:
    """Let the service refuse new requests, and wait for those that it has.

    `announce` is told how many these are, unless there are none. Returns how many are left after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    left = _drain()
    if left:
        announce(left)
    while left and time.monotonic() < deadline_s:
        time.sleep(DRAIN_POLL_S)
        left = _drain()
    return left


def _drain() -> int:
    """Return how many requests the service still has; none where its router is gone."""
    left = 0
    with contextlib.suppress(RayError, RayServeException):
        # All are told before any is waited for.
        for answer in [router.drain_service.remote() for router in _routers()]:
            with contextlib.suppress(RayError, RayServeException, TimeoutError):
                left += answer.result(timeout_s=CLOSE_TIMEOUT_S)
    return left


def _routers() -> list[DeploymentHandle]:
    """Return handles for a process that has no event loop, whatever the settings of the service's own processes."""
    application = serve.status().applications.get(APPLICATION_NAME)
    deployed = application.deployments if application else {}
    names = [name for name in deployed if name == ROUTER_NAME or name.startswith(f"{ROUTER_NAME}-")]
    handles = [serve.get_deployment_handle(name, APPLICATION_NAME) for name in names]
    for handle in handles:
        if not handle.is_initialized:
            handle._init(_run_router_in_separate_loop=True)
    return handles


def deploy(application: Application, host: str, port: int, route_prefix: str = "/") -> None:
    """Deploy and wait until every replica runs. Raises ConfigurationError when a deployment cannot start."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": host, "port": port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    try:
        serve.run(application, name=APPLICATION_NAME, route_prefix=route_prefix)
    except RuntimeError as error:
        raise ConfigurationError(_deployment_problem(str(error))) from error


def _deployment_problem(fallback: str) -> str:
    """Return the last line of what the failed deployment said, which is the error its worker raised."""
    application = serve.status().applications.get(APPLICATION_NAME)
    messages = [
        deployment.message.strip().splitlines()[-1]
        for deployment in (application.deployments.values() if application else ())
        if deployment.status == "DEPLOY_FAILED" and deployment.message.strip()
    ]
    problem = messages[0] if messages else fallback.strip().splitlines()[-1]
    return problem.split(f"{ConfigurationError.__name__}: ", maxsplit=1)[-1]


def wait_until_ready(url: str, timeout_s: float) -> None:
    """Poll /ready. Raises ConfigurationError when the service does not become ready in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == httpx.codes.OK:
                return
        time.sleep(READY_POLL_S)
    raise ConfigurationError(f"{url}/ready did not answer within {timeout_s:g} s")


def wait_for_drafters(url: str, drafters: int, timeout_s: float, api_key: str | None = None) -> None:
    """Poll /status until that many drafters are registered. Raises ConfigurationError when they do not come in time.

    A service is ready before: it answers without drafters.
    """
    deadline = time.monotonic() + timeout_s
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            workers = httpx.get(f"{url}/status", headers=headers, timeout=10.0).json()["workers"]
            if sum(worker["registration"]["role"] == "draft" for worker in workers) >= drafters:
                return
        time.sleep(READY_POLL_S)
    raise ConfigurationError(f"{url}: {drafters} drafters were not registered within {timeout_s:g} s")
