"""The `leadout` command."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from workers.errors import ConfigurationError

DEFAULT_CONFIG = Path(__file__).parent / "tiny-code.yaml"
BAD_CONFIGURATION = 2

cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(stderr=True)


@cli.callback()
def leadout() -> None:
    """Leadout: speculative decoding for large language models on Ray Serve."""


@cli.command("serve")
def serve_command(
    config: Annotated[Path, typer.Argument(help="a Serve config file")] = DEFAULT_CONFIG,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="listen here instead of the file's port")] = None,
    host: Annotated[str | None, typer.Option(help="listen on this address instead of the file's host")] = None,
) -> None:
    """Serve the models of CONFIG on this machine until Ctrl-C."""
    try:
        _serve(config, port, host)
    except ConfigurationError as error:
        console.print(f"leadout: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(BAD_CONFIGURATION) from error


def _serve(config_path: Path, port: int | None, host: str | None) -> None:
    """Check, start, announce, wait for the end. Heavy modules are imported step by step, so that progress shows."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _raise_interrupt)
    # A shell that starts programs in the background tells them to ignore Ctrl-C; whoever sends it here means it.
    signal.signal(signal.SIGINT, _raise_interrupt)
    with contextlib.ExitStack() as cluster:
        with _progress() as step:
            step("Checking configuration and models")
            from deployments.config import parse_config
            from deployments.preflight import check_deployment, resolve_models
            from deployments.serve_config import read_serve_config

            file = read_serve_config(config_path)
            config = resolve_models(parse_config(file.arguments))
            model = check_deployment(config)

            from deployments.local_cluster import check_port, deploy, local_ray, logical_cpus, wait_until_ready

            address, listen_port = host or file.host, port or file.port
            check_port(address, listen_port)
            step("Starting Ray")
            cluster.enter_context(local_ray(logical_cpus(config)))
            from deployments.app import wire

            step(f"Loading target {config.target.served_name} and {len(config.drafters)} drafter(s)")
            deploy(wire(config, model, start_attempts=1), address, listen_port, file.route_prefix)
            url = f"http://{address}:{listen_port}{file.route_prefix.rstrip('/')}"
            wait_until_ready(url, timeout_s=60.0)
        _print_welcome(url, config.target.served_name, time.monotonic() - began)
        _wait_for_interrupt()


def _wait_for_interrupt() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    console.print("Stopping …")


def _print_welcome(url: str, model: str, seconds: float) -> None:
    console.print(f"[bold green]Ready[/] after {seconds:.0f} s: {url}  (Ctrl-C stops everything)\n", highlight=False)
    request = (
        f"curl {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "prompt": "def read_file(path):\\n", "max_tokens": 48, "temperature": 0}}\''
    )
    # Printed as is: nothing may wrap or colour what people will copy.
    print(request, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what start-up is doing and for how long; the yielded function names the next step."""
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=False
    ) as progress:
        current: list[TaskID] = []

        def step(description: str) -> None:
            for task in current:
                progress.update(task, total=1, completed=1)
            current.append(progress.add_task(description, total=None))

        yield step
        for task in current:
            progress.update(task, total=1, completed=1)


def _raise_interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    cli()
