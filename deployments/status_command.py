"""`leadout status`: a service's workers, drafters, memory and totals; reading them is in service_status.py."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from deployments.console import API_KEY_VARIABLE, INTERRUPTED, one_line_errors

if TYPE_CHECKING:
    from deployments.service_status import Pace, ServiceStatus

PLAIN_WIDTH = 120
NOTHING = "-"


def status_command(
    url: Annotated[str, typer.Argument(help="the service to ask")] = "http://127.0.0.1:8000",
    watch: Annotated[bool, typer.Option("--watch", help="keep asking, until Ctrl-C")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="seconds between two readings")] = 2.0,
    api_key_env: Annotated[str, typer.Option(help="environment variable with the API key")] = API_KEY_VARIABLE,
) -> None:
    """Show the workers of a service, its drafters and their acceptance, KV memory, queue and totals.

    Exit status: 0 it answers, 2 it does not.
    """
    with one_line_errors():
        try:
            asyncio.run(_watch(url, api_key_env, every) if watch else _show_once(url, api_key_env))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


async def _show_once(url: str, variable: str) -> None:
    from deployments.api_client import api_key_from, open_client
    from deployments.service_status import pace, read_status

    async with open_client(url, api_key_from(variable)) as client:
        status = await read_status(client)
    _console().print(render(url, status, pace(None, status, 0.0), "since the start"))


async def _watch(url: str, variable: str, every_s: float) -> None:
    from deployments.api_client import ServiceError, api_key_from, open_client
    from deployments.service_status import pace, read_status

    async with open_client(url, api_key_from(variable)) as client:
        before, read_at = await read_status(client), time.monotonic()
        first = render(url, before, pace(None, before, 0.0), "since the start")
        with Live(first, console=_console(), auto_refresh=False) as live:
            while True:
                await asyncio.sleep(every_s)
                try:
                    now, asked_at = await read_status(client), time.monotonic()
                except ServiceError as error:
                    # A service that restarts comes back; whoever watches wants to see that.
                    live.update(Group(f"[red]{NOTHING}[/] {escape(str(error))}"), refresh=True)
                    continue
                shown = render(url, now, pace(before, now, asked_at - read_at), f"last {asked_at - read_at:.0f} s")
                live.update(shown, refresh=True)
                before, read_at = now, asked_at


def render(url: str, status: "ServiceStatus", rates: "Pace", period: str) -> Group:
    """Return the tables of one reading; `rates` are those of `period`."""
    state = "[bold green]ready[/]" if status.ready else "[bold red]not ready[/]"
    head = f"{escape(url)}: {state}, {status.running} running, {status.waiting} waiting"
    tables = [
        *([_routers(status)] if status.routers else []),
        _workers(status),
        *([_drafters(status)] if status.drafters else []),
    ]
    return Group(head, *tables, _rates(rates, period), _totals(status))


def _routers(status: "ServiceStatus") -> Table:
    table = Table("router", "state", "running", "waiting", "targets", "drafters", "rounds", "committed tokens")
    for router in status.routers:
        state = "answers" if router.answers else "[bold red]does not answer[/]"
        numbers = (router.running, router.waiting, router.targets, router.drafters)
        table.add_row(
            escape(router.name), state, *map(str, numbers), f"{router.rounds:,}", f"{router.committed_tokens:,}"
        )
    return table


def _workers(status: "ServiceStatus") -> Table:
    table = Table("worker", "role", "state", "link", "processes", "sequences", "KV blocks used", "KV use", "cached")
    for worker in status.workers:
        used = NOTHING if worker.used_blocks is None else f"{worker.used_blocks:,} of {worker.total_blocks:,}"
        table.add_row(
            escape(worker.name),
            worker.role,
            "[bold red]silent[/]" if worker.silent else "[yellow]draining[/]" if worker.draining else "serving",
            worker.link or NOTHING,
            " ".join(map(str, worker.processes)),
            NOTHING if worker.sequences is None else f"{worker.sequences:,}",
            used,
            _share(worker.kv_use),
            NOTHING if worker.cached_blocks is None else f"{worker.cached_blocks:,}",
        )
    if not status.workers:
        table.add_row("[red]no worker is registered[/]", *[""] * 8)
    return table


def _drafters(status: "ServiceStatus") -> Table:
    table = Table("drafter", "state", "acceptance lately", "accepted length", "verifications", "draft step, ms")
    for drafter in status.drafters:
        table.add_row(
            escape(drafter.name),
            "[yellow]benched[/]" if drafter.benched else "drafting",
            _share(drafter.acceptance),
            f"{drafter.accepted_length:.2f}",
            f"{drafter.verifications:,}",
            NOTHING if drafter.step_ms is None else f"{drafter.step_ms:.2f}",
        )
    return table


def _rates(rates: "Pace", period: str) -> str:
    length = NOTHING if rates.accepted_length is None else f"{rates.accepted_length:.2f}"
    round_ms = NOTHING if rates.round_ms is None else f"{rates.round_ms:.1f} ms"
    speed = f"{rates.tokens_per_s:,.0f} tokens/s, " if rates.tokens_per_s else ""
    return f"{period}: {speed}acceptance {_share(rates.acceptance)}, accepted length {length}, round {round_ms}"


def _totals(status: "ServiceStatus") -> str:
    names = ("rounds", "committed_tokens", "draft_tokens", "accepted_tokens", "preemptions")
    told = [f"{name.replace('_', ' ')} {status.totals.get(name, 0):,.0f}" for name in names]
    check = status.online_check
    if check.get("checked"):
        told.append(f"checked {check['checked']:,}, of them different {check.get('mismatched', 0):,}")
    return "totals: " + ", ".join(told)


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _console() -> Console:
    shown = Console(highlight=False)
    # A pipe has no width of its own, and a wrapped table cannot be read.
    return shown if shown.is_terminal else Console(width=PLAIN_WIDTH, highlight=False)
