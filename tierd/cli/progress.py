"""A bar on stderr while a verb works, if stderr is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def shown_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many of the total are done. name: what they are."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)
