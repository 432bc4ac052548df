"""What the commands share: a console on standard error, steps with a clock, errors in one line."""

import contextlib
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from workers.errors import LeadoutError

REFUSED = 2
INTERRUPTED = 130
API_KEY_VARIABLE = "LEADOUT_API_KEY"

console = Console(stderr=True)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with status 2 and one line for an error that is raised on purpose."""
    try:
        yield
    except LeadoutError as error:
        # Messages repeat what users wrote, brackets included.
        console.print(f"leadout: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(REFUSED) from error


@contextlib.contextmanager
def shown_steps() -> Iterator[Callable[[str], None]]:
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
