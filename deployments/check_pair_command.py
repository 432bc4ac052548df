"""`leadout check-pair`: two models in, tables and a verdict out; the checks themselves are in check_pair.py."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.capacity import expected_tokens
from deployments.console import one_line_errors, shown_steps

if TYPE_CHECKING:
    from deployments.check_pair import Measurement
    from workers.engine.pair import PairRow

UNSUITABLE = 1
PLAIN_WIDTH = 130


class DataType(StrEnum):
    """Of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Kind(StrEnum):
    """How the drafter's weights are stored."""

    NONE = "none"
    INT8 = "int8"
    NF4 = "nf4"
    AUTO = "auto"


def check_pair_command(
    target: Annotated[str, typer.Argument(help="local folder, GGUF file or Hugging Face id")],
    draft: Annotated[str, typer.Argument(help="likewise")],
    files_only: Annotated[bool, typer.Option("--files-only", help="load no weights")] = False,
    dtype: Annotated[DataType, typer.Option(help="of both models")] = DataType.BFLOAT16,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    quantization: Annotated[Kind, typer.Option(help="of the drafter")] = Kind.NONE,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 48,
) -> None:
    """Say whether DRAFT suits TARGET: tokenizers, contexts, memory, and what drafting would bring on this machine.

    Exit status: 0 it does, 1 it does not fit or does not pay, 2 could not check.
    """
    with one_line_errors():
        from workers.engine.pair import pair_rows

        rows = pair_rows(target, draft)
        measurement = None
        # What differs in the files is shown at once; the rest needs torch, which takes seconds to import.
        if not any(row.problem for row in rows):
            with shown_steps() as step:
                step("Reading configurations")
                from deployments.check_pair import PairOptions, measure_pair, memory_row, model_row

                options = PairOptions(str(dtype), threads, str(quantization), max_tokens)
                rows = [model_row(target, draft), *rows, memory_row(target, draft, options)]
                if not files_only and not any(row.problem for row in rows):
                    measurement = measure_pair(target, draft, options, step)
    raise typer.Exit(0 if _print(rows, measurement) else UNSUITABLE)


def _print(rows: "Sequence[PairRow]", measurement: "Measurement | None") -> bool:
    table = Table("", "target", "drafter", "result")
    for row in rows:
        result = f"no: {row.problem}" if row.problem else row.note or "ok"
        table.add_row(row.subject, row.target, row.drafter, result, style="red" if row.problem else None)
    shown = Console()
    shown = shown if shown.is_terminal else Console(width=PLAIN_WIDTH)
    shown.print(table, markup=False)
    if measurement is not None:
        shown.print(_measured(measurement))
    good, line = verdict(rows, measurement)
    shown.print(line, style="bold green" if good else "bold red", highlight=False, soft_wrap=True, markup=False)
    return good


def _measured(measurement: "Measurement") -> Table:
    from deployments.check_pair import DRAFT_LENGTHS

    table = Table("draft tokens", "draft, ms", "verify, ms", "expected tokens", "expected speed-up")
    table.add_row("0", "", f"{measurement.verify_ms[1]:.2f}", "1.00", "1.00")
    for count in DRAFT_LENGTHS:
        tokens = expected_tokens(measurement.acceptance, count)
        table.add_row(
            str(count),
            f"{count * measurement.draft_ms:.2f}",
            f"{measurement.verify_ms[count + 1]:.2f}",
            f"{tokens:.2f}",
            f"{measurement.speed_up(count):.2f}",
        )
    return table


def verdict(rows: "Sequence[PairRow]", measurement: "Measurement | None") -> tuple[bool, str]:
    """Return whether the pair is worth deploying, and the line that says so."""
    problem = next((f"{row.subject}: {row.problem}" for row in rows if row.problem), None)
    if problem is not None:
        return False, f"DOES NOT FIT: {problem}"
    if measurement is None:
        return True, "FITS, as far as files tell; nothing was run"
    count = measurement.best_draft_tokens
    found = (
        f"{measurement.acceptance:.0%} of drafts accepted, {measurement.accepted_length:.2f} tokens a verification at "
        f"4 drafts; best with {count}: {measurement.speed_up(count):.2f} times plain decoding, without messages"
    )
    pays = measurement.speed_up(count) > 1
    return pays, f"FITS: {found}" if pays else f"DOES NOT PAY: {found}"
