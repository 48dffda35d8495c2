"""Progress of token decoding on the console."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def token_progress(
    total: int, enabled: bool, description: str = "Drawing image tokens"
) -> Iterator[Callable[[int], None]]:
    """Show a bar over `total` tokens or steps with the remaining time; yields the function that takes what is done.

    Args:
        description: What is drawn.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not enabled) as bar:
        task = bar.add_task(description, total=total)
        yield lambda drawn: bar.update(task, advance=drawn)
