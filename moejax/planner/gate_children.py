"""The gate of the kernels, a process a chip: a compiler that dies takes one program with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from moejax.config import ConfigError
from moejax.planner.gate_table import Row
from moejax.planner.kernel_resources import Resources

START = "--start"  # of a child: the program it begins with; it then says what it is at
_TRIES = 2  # of a program whose compiler died: some crashes are races between its threads


def rows_of(command: Sequence[str], chip: str) -> Iterator[Row]:
    """Rows of one chip's programs, a fault for each whose compiler died.

    Args:
      command: prints, a line of JSON each, `{"begins": i, "case": name}` before program i and the
        rows behind it; takes `--start=i`.
      chip: its name.
    Raises:
      ConfigError: the command ends with 2; its last line says why.
    """
    start, tries = 0, 0
    rows: list[Row]
    while True:
        at, case, rows = start, "", []
        with tempfile.TemporaryFile("w+") as said:
            child = subprocess.Popen(
                [*command, f"{START}={start}"], stdout=subprocess.PIPE, stderr=said, text=True
            )
            assert child.stdout is not None
            for line in child.stdout:
                facts = json.loads(line)
                if "begins" in facts:
                    yield from rows
                    at, case, rows = facts["begins"], facts["case"], []
                    tries = tries if at == start else 0
                else:
                    facts["of"] = Resources(**facts["of"])
                    rows.append(Row(**facts | {"faults": tuple(facts["faults"])}))
            code = child.wait()
            if code == 2:
                said.seek(0)
                raise ConfigError(said.read().strip().splitlines()[-1].removeprefix("error: "))
        if code >= 0:
            yield from rows
            return
        tries += 1
        if tries == _TRIES:  # rows of a program that is done when the process dies are lost with it
            died = f"the compiler died {_TRIES} times, of {signal.Signals(-code).name}"
            yield Row(chip, case, Resources(""), faults=(died,))
            at, tries = at + 1, 0
        start = at


def child_of(chip: str, ops: str, quick: bool) -> list[str]:
    """The command that :func:`rows_of` takes."""
    command = [sys.executable, "-m", "moejax.planner.kernel_gate", "--json"]
    return [*command, f"--chips={chip}", f"--ops={ops}", *(["--quick"] if quick else [])]
