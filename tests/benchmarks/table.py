"""Tables that are shown in the terminal and kept as Markdown."""

from dataclasses import dataclass, field

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table as RichTable


@dataclass
class Table:
    """A table with its caption; every row has one text for each column."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def show(self, console: Console) -> None:
        table = RichTable(*self.columns, box=MARKDOWN)
        for row in self.rows:
            table.add_row(*row)
        console.print(f"\n[bold]{self.title}[/bold]\n{self.note}", table)

    def markdown(self) -> str:
        lines = (self.columns, tuple("---" for _ in self.columns), *self.rows)
        return "\n".join([f"## {self.title}", "", self.note, "", *(f"| {' | '.join(line)} |" for line in lines)])


def times_faster(baseline: float, seconds: float) -> str:
    return f"{baseline / seconds:.2f}x"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 1 else f"{1000 * seconds:.0f}"
