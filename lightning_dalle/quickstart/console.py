"""The figures on the console."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lightning_dalle.quickstart.figures import Figure

_VERDICTS = {True: "[green]met", False: "[red]not met", None: ""}


def print_figures(console: Console, figures: Sequence[Figure]) -> None:
    """A table of values beside their targets."""
    table = Table("Figure", title="Figures", title_justify="left")
    table.add_column("Value", justify="right")
    table.add_column("Target", justify="right")
    table.add_column("")
    for figure in figures:
        table.add_row(figure.label, figure.value_text, figure.target_text, _VERDICTS[figure.met])
    console.print(table)
