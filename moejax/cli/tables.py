"""Tables that are pretty on a terminal and plain, whole and easy to grep in a pipe."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import rich.console
import rich.table
import rich.text

_GAP = 2
# Remarks narrower than this are harder to read than lines the terminal wraps.
_MIN_REMARK = 24


@dataclasses.dataclass(frozen=True)
class Column:
    """How a column is shown: `right` aligns numbers; `dim` is for remarks, which may fold."""

    right: bool = False
    dim: bool = False


def size(num_bytes: int) -> str:
    """Bytes in the unit that people would say: `29.5 MB`, `8.29 GB`."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def say(line: str, *, bold: bool = False) -> None:
    """One line, never wrapped."""
    if bold and sys.stdout.isatty():
        rich.console.Console().print(rich.text.Text(line, style="bold"), soft_wrap=True)
    else:
        print(line)


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], header: Sequence[str] | None = None
) -> None:
    """Rows of text in aligned columns; a wide enough terminal gets remarks folded and dim."""
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    if sys.stdout.isatty():
        console = rich.console.Console()
        least = [
            min(width, _MIN_REMARK) if column.dim else width
            for width, column in zip(widths, columns, strict=True)
        ]
        if sum(least) + _GAP * (len(columns) - 1) <= console.width:
            console.print(_rich_table(columns, rows, header))
            return
    for line in lines:
        cells = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        print((" " * _GAP).join(cells).rstrip())


def _rich_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], header: Sequence[str] | None
) -> rich.table.Table:
    table = rich.table.Table(
        box=None, show_header=bool(header), pad_edge=False, padding=(0, _GAP, 0, 0)
    )
    for i, column in enumerate(columns):
        table.add_column(
            header[i] if header else "",
            justify="right" if column.right else "left",
            style="dim" if column.dim else None,
            no_wrap=not column.dim,
        )
    for row in rows:
        table.add_row(*(rich.text.Text(cell) for cell in row))
    return table
