"""`leadout plan`: GPUs, memory and expected speed of a configuration, from files alone."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.accelerators import CATALOGUE, RAY_ACCELERATOR_LABEL, accelerator
from cluster.capacity import LIKELY_HIT
from cluster.errors import PlanError
from cluster.topology import Node
from deployments.console import one_line_errors
from workers.errors import ConfigurationError

if TYPE_CHECKING:
    from deployments.capacity_plan import DeploymentPlan, PairPlan, RolePlan

DOES_NOT_FIT = 1
PLAIN_WIDTH = 140


def plan_command(
    config: Annotated[Path, typer.Argument(help="a Serve config file")],
    acceptance: Annotated[float | None, typer.Option(min=0, max=1, help="share of drafts accepted")] = None,
    hit: Annotated[float, typer.Option(min=0, max=1, help="outcomes that were drafted behind, ahead")] = LIKELY_HIT,
    target_step_ms: Annotated[float | None, typer.Option(min=0.001, help="measured, of one sequence")] = None,
    draft_step_ms: Annotated[list[str] | None, typer.Option(help="DRAFTER=MS: likewise, of one draft")] = None,
    context_tokens: Annotated[int, typer.Option(min=1, help="in the KV of each sequence, for step times")] = 1024,
    accelerators: Annotated[
        list[str] | None, typer.Option("--accelerator", help=f"ROLE=NAME; names: {', '.join(CATALOGUE)}")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option("--node", help="a machine: 4xA100-80GB, with labels 8xL4,pool=drafts")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object on standard output")] = False,
) -> None:
    """Print what CONFIG needs and should bring: GPUs per role, memory per GPU, expected speed-up, drafters per target.

    Nothing is loaded or downloaded. Exit status: 0 it fits, 1 it does not, 2 could not plan.
    """
    with one_line_errors():
        # Both need torch, by way of the engine's configuration.
        from deployments.capacity_plan import PlanOptions, plan_deployment
        from deployments.config import parse_config
        from deployments.preflight import resolve_models
        from deployments.serve_config import read_serve_config

        options = PlanOptions(
            accelerators=dict(map(_assignment, accelerators or ())),
            hit=hit,
            target_step_ms=target_step_ms,
            draft_step_ms=dict(map(_milliseconds, draft_step_ms or ())),
            context_tokens=context_tokens,
            nodes=[_node(text, number) for number, text in enumerate(nodes or (), 1)],
            **({} if acceptance is None else {"acceptance": acceptance}),
        )
        plan = plan_deployment(resolve_models(parse_config(read_serve_config(config).arguments)), options)
    if as_json:
        print(json.dumps(plan_as_json(plan, options.acceptance), indent=2))
    else:
        _print(plan, options.acceptance)
    raise typer.Exit(DOES_NOT_FIT if plan.problems else 0)


def plan_as_json(plan: "DeploymentPlan", acceptance: float) -> dict[str, Any]:
    """Return the plan as plain data; memory in bytes, times in milliseconds."""
    return {
        "gpus": plan.gpus,
        "acceptance": acceptance,
        "roles": [_role_as_json(each) for each in plan.roles],
        "drafters": [
            {
                "name": pair.drafter,
                "replicas": pair.configured,
                "replicas_kept_busy": pair.needed,
                "expected": [
                    {**asdict(row), "plain_tokens_per_s": row.plain_tokens_per_s, "tokens_per_s": row.tokens_per_s}
                    for row in pair.rows
                ],
            }
            for pair in plan.pairs
        ],
        "placement": [{"role": key, "node": node} for key, node in plan.nodes],
        "warnings": list(plan.warnings),
        "problems": list(plan.problems),
    }


def _role_as_json(each: "RolePlan") -> dict[str, Any]:
    role, memory, step = each.role, each.memory, each.step
    return {
        "name": each.name,
        "model": each.shape.shape.name,
        "parameters": each.shape.shape.parameters,
        "replicas": role.replicas,
        "processes_per_replica": role.ranks,
        "accelerator": role.accelerator.name,
        "gpus": role.gpus,
        "bundles": role.bundles,
        "memory_per_process": {
            "weights": memory.weights,
            "kv": memory.pool,
            "kv_tokens": memory.pool_tokens,
            "kv_token_bytes": memory.token_bytes,
            "rest": memory.rest,
            "total": memory.total,
            "available": memory.capacity,
        },
        "step_ms": step.ms(1, 1),
        "step_origin": step.origin,
    }


def _assignment(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not role:
        raise ConfigurationError(f"--accelerator {text}: write ROLE=NAME, such as target=A100-80GB")
    return role, name


def _milliseconds(text: str) -> tuple[str, float]:
    drafter, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise ConfigurationError(f"--draft-step-ms {text}: write DRAFTER=MS, such as small=4.5")
    return drafter, value


def _node(text: str, number: int) -> Node:
    kind, *labels = text.split(",")
    count, times, name = kind.partition("x")
    try:
        device = accelerator(name)
    except PlanError as error:
        raise ConfigurationError(f"--node {text}: {error}") from error
    if not times or not count.isdigit() or not all("=" in label for label in labels):
        raise ConfigurationError(f"--node {text}: write COUNTxNAME, such as 4xA100-80GB, then ,label=value")
    named = {RAY_ACCELERATOR_LABEL: device.ray_type or "", **dict(label.split("=", 1) for label in labels)}
    return Node(f"node {number} ({kind})", named, {"GPU": float(count)})


def _print(plan: "DeploymentPlan", acceptance: float) -> None:
    shown = Console()
    shown = shown if shown.is_terminal else Console(width=PLAIN_WIDTH)
    shown.print(_roles(plan.roles), markup=False)
    for pair in plan.pairs:
        shown.print(_pair(pair, acceptance), markup=False)
        shown.print(_summary(pair), highlight=False, soft_wrap=True, markup=False)
    for key, node in plan.nodes:
        shown.print(f"{key} on {node}", highlight=False, soft_wrap=True, markup=False)
    for line in plan.warnings:
        shown.print(f"note: {line}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    for line in plan.problems:
        shown.print(f"DOES NOT FIT: {line}", style="bold red", highlight=False, soft_wrap=True, markup=False)
    if not plan.problems:
        gpus = ", ".join(f"{count} x {name}" for name, count in plan.gpus.items()) or "no GPUs"
        shown.print(f"FITS: {gpus}", style="bold green", highlight=False, soft_wrap=True, markup=False)


def _roles(roles: "Sequence[RolePlan]") -> Table:
    title = "Memory per GPU (on CPUs, per process), GB"
    table = Table("role", "model", "form", "runs on", "GPUs", "weights", "KV", "rest", "of", "KV tokens", "step, ms")
    table.title, table.title_justify = title, "left"
    for each in roles:
        need, memory, device = each.memory.need, each.memory, each.role.accelerator
        table.add_row(
            each.name,
            f"{each.shape.shape.name} ({each.shape.shape.parameters / 1e9:.3g} B)",
            need.dtype if need.quantization == "none" else need.quantization,
            f"{each.role.replicas} x {each.role.ranks} x {device.name}",
            str(each.role.gpus),
            _gigabytes(memory.weights),
            _gigabytes(memory.pool),
            _gigabytes(memory.rest),
            "the machine" if memory.capacity is None else _gigabytes(memory.capacity),
            f"{memory.pool_tokens:,}",
            f"{each.step.ms(1, 1):.3g} ({each.step.origin})",
            style=None if memory.fits else "red",
        )
    return table


def _pair(pair: "PairPlan", acceptance: float) -> Table:
    table = Table("sequences", "draft, ms", "drafts in turn", "speed-up", "drafts ahead", "speed-up", "tokens/s, plain",
                  "tokens/s, ahead", "drafters a target", "break-even")  # fmt: skip
    table.title = f"Expected of one target with drafter {pair.drafter} at acceptance {acceptance:g}"
    table.title_justify = "left"
    for row in pair.rows:
        table.add_row(
            str(row.sequences),
            f"{row.draft_ms:.3g}",
            str(row.in_turn.draft_tokens),
            f"{row.in_turn.speed_up:.2f}",
            str(row.ahead.draft_tokens),
            f"{row.ahead.speed_up:.2f}",
            f"{row.plain_tokens_per_s:.0f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.drafters:.2f}",
            "never" if row.break_even is None else f"{row.break_even:.2f}",
        )
    return table


def _summary(pair: "PairPlan") -> str:
    if not pair.needed:
        return f"Drafter {pair.drafter} would not be used."
    return f"Drafter {pair.drafter}: all targets keep {pair.needed} busy at most; {pair.configured} configured."


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}" if count < 1e9 else f"{count / 1e9:.1f}"
