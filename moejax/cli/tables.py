"""Tables that are pretty on a terminal and plain, whole and easy to grep in a pipe."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import rich.console
import rich.table
import rich.text


@dataclasses.dataclass(frozen=True)
class Column:
    """How a column is shown: `right` aligns numbers, `dim` is for remarks."""

    right: bool = False
    dim: bool = False


def say(line: str, *, bold: bool = False) -> None:
    """One line, never wrapped."""
    if bold and sys.stdout.isatty():
        rich.console.Console().print(rich.text.Text(line, style="bold"), soft_wrap=True)
    else:
        print(line)


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], header: Sequence[str] | None = None
) -> None:
    """Rows of text in aligned columns; only a terminal folds long cells."""
    if sys.stdout.isatty():
        _print_rich(columns, rows, header)
        return
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_rich(columns, rows, header) -> None:
    table = rich.table.Table(box=None, show_header=bool(header), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(
            header[i] if header else "",
            justify="right" if column.right else "left",
            style="dim" if column.dim else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(rich.text.Text(cell) for cell in row))
    rich.console.Console().print(table)
