"""`leadout bench`: options in, a table, JSON and a picture out; the measurement itself is in endpoint_bench.py."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deployments.console import API_KEY_VARIABLE, INTERRUPTED, console, one_line_errors

if TYPE_CHECKING:
    from deployments.endpoint_bench import BenchOptions, Level, Percentiles
    from deployments.prompt_file import FilePrompt

DEFAULT_CONCURRENCIES = (1, 2, 4, 8, 16)
PLAIN_WIDTH = 120
NOTHING = "-"


def bench_command(
    url: Annotated[str, typer.Argument(help="any OpenAI-compatible service, with or without /v1")],
    prompts: Annotated[
        Path | None, typer.Option(help="one prompt per line, or *.jsonl with requests; default: built-in ones")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="requests in flight; may be given more than once", show_default="1, 2, 4, 8, 16"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="at each concurrency", show_default="4 for each in flight, at least 8")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="ask the built-in prompts as chats")] = False,
    model: Annotated[str | None, typer.Option(help="default: the first that the service lists")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw it there, as SVG")] = None,
    api_key_env: Annotated[str, typer.Option(help="environment variable with the API key")] = API_KEY_VARIABLE,
) -> None:
    """Measure a service by its streams: time to first token, time between tokens, throughput, accepted length.

    Exit status: 0 measured, 1 measured and some requests failed, 2 could not measure.
    """
    with one_line_errors(), _interrupted_is_not_failed():
        from deployments.api_client import ServiceError
        from deployments.endpoint_bench import BenchOptions, built_in_prompts
        from deployments.prompt_file import read_prompts

        if plot_file is not None and plot_file.suffix != ".svg":
            raise ServiceError(f"--plot {plot_file}: the picture is an SVG; name the file *.svg")
        if prompts is not None and chat:
            raise ServiceError("give --prompts or --chat, not both; a *.jsonl file may hold messages")
        levels = tuple(dict.fromkeys(concurrency or DEFAULT_CONCURRENCIES))
        options = BenchOptions(levels, requests, max_tokens, temperature, model)
        asked = built_in_prompts(chat) if prompts is None else read_prompts(prompts)
        measured = asyncio.run(_measure(url, asked, options, api_key_env))
        _print(measured)
        _write(url, options, measured, json_file, plot_file)
    if any(level.errors for level in measured):
        raise typer.Exit(1)


async def _measure(url: str, prompts: "Sequence[FilePrompt]", options: "BenchOptions", variable: str) -> "list[Level]":
    from deployments.api_client import api_key_from, open_client
    from deployments.endpoint_bench import bench

    with _progress(options) as answered:
        async with open_client(url, api_key_from(variable)) as client:
            return await bench(client, prompts, options, answered)


@contextlib.contextmanager
def _progress(options: "BenchOptions") -> Iterator[Callable[[int], None]]:
    """Show a bar for each level; the yielded function moves that of one concurrency on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {
            each: progress.add_task(f"{each} in flight", total=options.requests_at(each), start=False)
            for each in options.concurrencies
        }

        def answered(concurrency: int) -> None:
            progress.start_task(tasks[concurrency])
            progress.advance(tasks[concurrency])

        yield answered


@contextlib.contextmanager
def _interrupted_is_not_failed() -> Iterator[None]:
    """Ctrl-C ends with a status of its own; typer's is 1."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _print(levels: "Sequence[Level]") -> None:
    shown = Console()
    shown = shown if shown.is_terminal else Console(width=PLAIN_WIDTH)
    shown.print(_throughput(levels))
    shown.print(_latency(levels))
    if not all(level.tokens_counted for level in levels):
        console.print("The service sends no usage in streams: one token was counted per event.", style="yellow")


def _throughput(levels: "Sequence[Level]") -> Table:
    speculating = any(level.accepted_length is not None for level in levels)
    table = Table("in flight", "answered", "failed", "tokens/s", "requests/s")
    if speculating:
        table.add_column("accepted length")
    for level in levels:
        failed = ", ".join(f"{count} x {what}" for what, count in sorted(level.errors.items()))
        length = NOTHING if level.accepted_length is None else f"{level.accepted_length:.2f}"
        table.add_row(
            str(level.concurrency),
            str(level.requests),
            failed or NOTHING,
            f"{level.tokens_per_s:,.1f}",
            f"{level.requests_per_s:,.2f}",
            *([length] if speculating else []),
        )
    return table


def _latency(levels: "Sequence[Level]") -> Table:
    table = Table("in flight", title="ms: p50 / p95 / p99", title_justify="left")
    for column in ("first token", "between events", "per token", "whole request"):
        table.add_column(column)
    for level in levels:
        times = (level.ttft_ms, level.itl_ms, level.tpot_ms, level.request_ms)
        table.add_row(str(level.concurrency), *map(_times, times))
    return table


def _times(found: "Percentiles | None") -> str:
    if found is None:
        return NOTHING
    return " / ".join(
        f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in (found.p50, found.p95, found.p99)
    )


def _write(
    url: str, options: "BenchOptions", levels: "Sequence[Level]", json_file: Path | None, plot_file: Path | None
) -> None:
    from deployments.api_client import ServiceError
    from deployments.bench_plot import plot

    try:
        if json_file is not None:
            told = {"url": url, "options": asdict(options), "levels": [asdict(level) for level in levels]}
            json_file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        if plot_file is not None:
            plot_file.write_text(plot(levels, f"{options.model or 'model'} at {url}"), encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"{error.filename}: {error.strerror}") from error
