"""A service on this machine for as long as a command runs: `leadout serve`, and others that need one."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.console import shown_steps

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LocalService:
    """A service that answers at `url`; `drafters` is how many draft workers it is to have.

    With `asks_for_key` it answers only who has an API key.
    """

    url: str
    model: str
    drafters: int
    asks_for_key: bool = False


@contextlib.contextmanager
def local_service(config_path: Path, port: int | None, host: str | None) -> Iterator[LocalService]:
    """Check, start and announce what CONFIG says; end it with the block. ConfigurationError if that cannot be.

    Heavy modules are imported step by step, so that progress shows.
    """
    signal.signal(signal.SIGTERM, _raise_interrupt)
    # A shell that starts programs in the background tells them to ignore Ctrl-C; whoever sends it here means it.
    signal.signal(signal.SIGINT, _raise_interrupt)
    with contextlib.ExitStack() as cluster:
        with shown_steps() as step:
            step("Checking configuration and models")
            from deployments.config import parse_config
            from deployments.machine_memory import check_machine_memory
            from deployments.preflight import check_deployment, resolve_models
            from deployments.serve_config import read_serve_config

            file = read_serve_config(config_path)
            config = resolve_models(parse_config(file.arguments))
            asks_for_key = bool(config.ingress.access_rules().keys)
            model = check_deployment(config)
            check_machine_memory(config)

            from deployments.local_cluster import check_port, deploy, local_ray, logical_cpus, wait_until_ready

            address, listen_port = host or file.host, port or file.port
            check_port(address, listen_port)
            step("Starting Ray")
            cluster.enter_context(local_ray(logical_cpus(config)))
            from deployments.app import wire

            step(f"Loading target {config.target.served_name} and {len(config.drafters)} drafter(s)")
            deploy(wire(config, model, start_attempts=1), address, listen_port, file.route_prefix)
            url = f"http://{address}:{listen_port}{file.route_prefix.rstrip('/')}"
            wait_until_ready(url, READY_TIMEOUT_S)
        drafters = sum(drafter.first_replicas for drafter in config.drafters)
        yield LocalService(url, config.target.served_name, drafters, asks_for_key)


def _raise_interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
