"""`leadout verify`: options in, a table and a verdict out; the comparison itself is in verify.py."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deployments.console import API_KEY_VARIABLE, INTERRUPTED, console, one_line_errors
from deployments.local_service import READY_TIMEOUT_S, local_service
from workers.messages import Verification

if TYPE_CHECKING:
    from deployments.verify import Comparison

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TEMPERATURES = (0.0, 0.8)
DIFFERENT = 1
# A pipe has no width of its own, and a wrapped table cannot be read.
PLAIN_WIDTH = 120


class Output(StrEnum):
    """How the result is printed."""

    TABLE = "table"
    JSON = "json"


def verify_command(
    prompts: Annotated[Path, typer.Argument(help="one prompt per line, or *.jsonl with requests")],
    url: Annotated[str | None, typer.Option(help="the service to ask", show_default=DEFAULT_URL)] = None,
    config: Annotated[Path | None, typer.Option(help="start the service of this Serve config file instead")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="may be given more than once", show_default="0 and 0.8")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="of the first prompt; each next one has one more")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="ask no more prompts than this")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests in flight")] = 8,
    verification: Annotated[Verification, typer.Option(help="ratio: at temperature 0 only")] = Verification.COUPLED,
    api_key_env: Annotated[str, typer.Option(help="environment variable with the API key")] = API_KEY_VARIABLE,
    output: Annotated[Output, typer.Option(help="json goes to standard output as one object")] = Output.TABLE,
) -> None:
    """Ask for every prompt with and without drafts, and compare the answers id by id.

    Exit status: 0 all equal, 1 some differ, 2 could not compare.
    """
    with one_line_errors(), _interrupted_is_not_different():
        from deployments.api_client import api_key_from
        from deployments.prompt_file import read_prompts
        from deployments.verify import VerifyError, VerifyOptions, plan_cases, verify

        if url is not None and config is not None:
            raise VerifyError("give --url or --config, not both")
        chosen = tuple(dict.fromkeys(temperature or ())) or (
            DEFAULT_TEMPERATURES if verification is Verification.COUPLED else (0.0,)
        )
        options = VerifyOptions(chosen, max_tokens, seed, verification, concurrency)
        cases = plan_cases(read_prompts(prompts, limit), options)
        api_key = api_key_from(api_key_env)
        with _service(url, config, api_key) as address, _progress(2 * len(cases)) as answered:
            comparisons = asyncio.run(verify(address, cases, options.concurrency, answered, api_key))
    raise typer.Exit(0 if _print(comparisons, output) else DIFFERENT)


@contextlib.contextmanager
def _service(url: str | None, config: Path | None, api_key: str | None) -> Iterator[str]:
    """The service to ask; one of its own listens on a free port, so that it is in nobody's way."""
    if config is None:
        yield url or DEFAULT_URL
        return
    from deployments.local_cluster import free_port, wait_for_drafters

    with local_service(config, free_port(), "127.0.0.1") as service:
        wait_for_drafters(service.url, service.drafters, READY_TIMEOUT_S, api_key)
        yield service.url


@contextlib.contextmanager
def _progress(answers: int) -> Iterator[Callable[[], None]]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Asking", total=answers)
        yield lambda: progress.advance(task)


@contextlib.contextmanager
def _interrupted_is_not_different() -> Iterator[None]:
    """Ctrl-C ends with a status of its own; typer's is 1."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _print(comparisons: "list[Comparison]", output: Output) -> bool:
    from deployments.verify import verdict

    equal, line = verdict(comparisons)
    if output is Output.JSON:
        rows = [asdict(comparison) for comparison in comparisons]
        print(json.dumps({"lossless": equal, "verdict": line, "temperatures": rows}, indent=2))
        return equal
    table = Table("temperature", "prompts", "tokens compared", "differing answers", "accepted length")
    table.add_column("tokens/s, drafts")
    table.add_column("tokens/s, plain")
    for row in comparisons:
        table.add_row(
            f"{row.temperature:g}",
            f"{row.prompts:,}",
            f"{row.tokens:,}",
            f"{len(row.differences):,}",
            f"{row.accepted_length:.2f}",
            f"{row.drafted_tokens_per_s:,.0f}",
            f"{row.plain_tokens_per_s:,.0f}",
        )
    shown = Console()
    shown = shown if shown.is_terminal else Console(width=PLAIN_WIDTH)
    shown.print(table)
    shown.print(line, style="bold green" if equal else "bold red", highlight=False, soft_wrap=True, markup=False)
    return equal
