"""The `leadout` command."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from deployments.bench_command import bench_command
from deployments.check_pair_command import check_pair_command
from deployments.complete_command import complete_command
from deployments.console import API_KEY_VARIABLE, console, one_line_errors
from deployments.fetch_command import fetch_command
from deployments.hash_key_command import hash_key_command
from deployments.local_service import LocalService, local_service
from deployments.plan_command import plan_command
from deployments.status_command import status_command
from deployments.verify_command import verify_command

DEFAULT_CONFIG = Path(__file__).parent / "tiny-code.yaml"

cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
cli.command("verify")(verify_command)
cli.command("check-pair")(check_pair_command)
cli.command("bench")(bench_command)
cli.command("status")(status_command)
cli.command("complete")(complete_command)
cli.command("fetch")(fetch_command)
cli.command("hash-key")(hash_key_command)
cli.command("plan")(plan_command)


@cli.callback()
def leadout() -> None:
    """Leadout: speculative decoding for large language models on Ray Serve."""


@cli.command("serve")
def serve_command(
    config: Annotated[Path, typer.Argument(help="a Serve config file")] = DEFAULT_CONFIG,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="listen here instead of the file's port")] = None,
    host: Annotated[str | None, typer.Option(help="listen on this address instead of the file's host")] = None,
) -> None:
    """Serve the models of CONFIG on this machine until Ctrl-C. Requests finish first, unless it comes twice."""
    began = time.monotonic()
    with one_line_errors(), local_service(config, port, host) as service:
        _print_welcome(service, time.monotonic() - began)
        _wait_for_interrupt()
        service.drain()
        console.print("Stopping …")


def _wait_for_interrupt() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def _print_welcome(service: LocalService, seconds: float) -> None:
    url, model = service.url, service.model
    console.print(f"[bold green]Ready[/] after {seconds:.0f} s: {url}  (Ctrl-C stops)\n", highlight=False)
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if service.asks_for_key else ""
    request = (
        f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "prompt": "def read_file(path):\\n", "max_tokens": 48, "temperature": 0}}\''
    )
    # Printed as is: nothing may wrap or colour what people will copy.
    print(request, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli()
