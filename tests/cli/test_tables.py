"""Names stay whole wherever a table is printed; only remarks fold, and only on a terminal."""

import re
import sys

import pytest

from moejax.cli.tables import Column, print_table

NAME, REMARK = (
    "stack1.run1.ffn.experts.gate_up",
    "a remark that is much longer than a terminal " * 3,
)


def _lines(capsys, monkeypatch, width: int | None) -> list[str]:
    """The printed lines without colours; width None stands for a pipe."""
    if width is not None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
    columns = [Column(), Column(right=True), Column(dim=True)]
    print_table(columns, [[NAME, "1,024", REMARK], ["short", "7", ""]], ["name", "bytes", "what"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [None, 30])
def test_a_pipe_and_a_narrow_terminal_get_one_line_a_row(capsys, monkeypatch, width):
    lines = _lines(capsys, monkeypatch, width)
    assert len(lines) == 3
    assert lines[1].split(None, 2) == [NAME, "1,024", REMARK.strip()]
    assert lines[2].split() == ["short", "7"]


def test_a_wide_terminal_folds_remarks_only(capsys, monkeypatch):
    lines = _lines(capsys, monkeypatch, 100)
    assert len(lines) > 3 and all(len(line) <= 100 for line in lines)
    assert lines[1].split()[:2] == [NAME, "1,024"]
    assert " ".join(" ".join(lines[1:-1]).split()) == f"{NAME} 1,024 {REMARK.strip()}"
