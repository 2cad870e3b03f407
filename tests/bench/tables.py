"""Tables of figures, for people and as JSON (bench: imports rich)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Figure:
    """A median and its range.

    Args:
        values: what was measured, one per round.
        digits: after the point.
        unit: shown behind.
    """

    values: Sequence[float]
    digits: int = 3
    unit: str = ""

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        d, unit = self.digits, f" {self.unit}" if self.unit else ""
        if len(self.values) == 1:
            return f"{self.median:.{d}f}{unit}"
        return f"{self.median:.{d}f} [{min(self.values):.{d}f}..{max(self.values):.{d}f}]{unit}"

    def plain(self) -> dict[str, Any]:
        """Give it as JSON."""
        return {"median": self.median, "low": min(self.values), "high": max(self.values), "unit": self.unit}


Cell = Figure | str


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table.

    Args:
        name: what `--only` calls it.
        title: says what is in it.
        rows: each a cell per column, by the column's title; the first is the row's name.
        notes: how it was measured, and what to bear in mind.
    """

    name: str
    title: str
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Give it as JSON."""
        rows = [{k: v.plain() if isinstance(v, Figure) else v for k, v in row.items()} for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows, "notes": self.notes}


def show(table: Table, console: Console) -> None:
    """Print a table."""
    columns = list(dict.fromkeys(column for row in table.rows for column in row))
    drawn = RichTable(title=table.title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in table.rows:
        drawn.add_row(*(str(row.get(column, "")) for column in columns))
    console.print(drawn)
    for note in table.notes:
        console.print(f"  {note}", markup=False, highlight=False)
    console.print()


def show_machine(facts: dict[str, str], console: Console) -> None:
    """Print the header."""
    for name, value in facts.items():
        console.print(f"{name + ':':18}{value}", markup=False, highlight=False)
    console.print()
