"""The standard output, which may be a terminal, a file, or a pipe whose reader has gone."""

from __future__ import annotations

import os

import rich.console


class Console(rich.console.Console):
    """A rich console that falls silent, instead of ending the run, when nobody reads it."""

    def on_broken_pipe(self) -> None:
        """Sends what is left to nowhere; else the interpreter would complain when it flushes."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
