"""A service on this machine for as long as a command runs: `leadout serve`, and others that need one."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.console import console, shown_steps

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LocalService:
    """A service that answers at `url`; `drafters` is how many draft workers it is to have.

    With `asks_for_key` it answers only who has an API key. `drain_timeout_s` is what requests get when it is stopped.
    """

    url: str
    model: str
    drafters: int
    asks_for_key: bool = False
    drain_timeout_s: float = 0.0

    def drain(self) -> None:
        """Refuse new requests and wait for those in progress, for its time at most, or until Ctrl-C."""
        from deployments.local_cluster import wait_until_drained

        with contextlib.suppress(KeyboardInterrupt):
            left = wait_until_drained(self.drain_timeout_s, self._announce)
            if left:
                console.print(f"{_requests(left)} did not finish within {self.drain_timeout_s:g} s")

    def _announce(self, running: int) -> None:
        told = f"Draining: {_requests(running)} still running, at most {self.drain_timeout_s:g} s"
        console.print(f"{told}; Ctrl-C again ends at once", highlight=False, soft_wrap=True)


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
        # An end that is interrupted would leave processes behind.
        cluster.callback(_ignore_interrupts)
        grace_s = config.ingress.graceful_shutdown_timeout_s
        yield LocalService(url, config.target.served_name, drafters, asks_for_key, grace_s)


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _raise_interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
