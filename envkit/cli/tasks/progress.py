"""Progress of commands that work on many tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Show a progress bar on a terminal; yield functions that print a line, and that set the progress."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=total)
        yield (
            lambda line: console.print(line, markup=False, highlight=False),
            lambda completed: progress.update(bar, completed=completed),
        )
