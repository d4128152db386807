"""Places metrics go to, behind one `write(step, metrics)`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import tensorboardX

from moejax.config import LogConfig
from moejax.observability.metrics import MetricsLog, plain, unwritable


@runtime_checkable
class MetricsWriter(Protocol):
    """Takes the metrics of a step."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes what is left and frees the file."""
        ...


class TensorBoard:
    """Scalars to `<workdir>/tensorboard`; a list becomes curves `name/00`, `name/01`, ..."""

    def __init__(self, workdir: str | pathlib.Path, *, first_step: int | None = None):
        """
        Args:
          workdir: the run's folder.
          first_step: as for MetricsLog; TensorBoard hides what an earlier run wrote from there on.
        Raises:
          ConfigError: the folder cannot be written.
        """
        self.path = pathlib.Path(workdir) / "tensorboard"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._writer = tensorboardX.SummaryWriter(
                str(self.path), purge_step=first_step, flush_secs=10
            )
        except OSError as error:
            raise unwritable(self.path, error) from error

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds every number; None and text are left out."""
        for name, value in metrics.items():
            for tag, number in _scalars(name, plain(value)):
                self._writer.add_scalar(tag, number, step)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds a text, shown as it stands (indented, which Markdown leaves alone)."""
        block = "".join(f"    {line}\n" for line in text.split("\n"))
        self._writer.add_text(name, block, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


def _scalars(name: str, value: Any) -> list[tuple[str, int | float]]:
    if isinstance(value, list):
        width = len(str(len(value) - 1))
        pairs = [_scalars(f"{name}/{i:0{width}d}", item) for i, item in enumerate(value)]
        return [pair for group in pairs for pair in group]
    return [] if value is None or isinstance(value, str) else [(name, value)]


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Sequence[MetricsWriter]):
        self._writers = list(writers)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes to each."""
        values = {name: plain(value) for name, value in metrics.items()}
        for writer in self._writers:
            writer.write(step, values)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Gives a text to those that show texts."""
        for writer in self._writers:
            if isinstance(writer, TensorBoard):
                writer.write_text(step, name, text)

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()


def open_writers(
    workdir: str | pathlib.Path, cfg: LogConfig, *, first_step: int | None = None
) -> Writers:
    """The writers a run's `log` section asks for: `metrics.jsonl` always, TensorBoard if set."""
    writers: list[MetricsWriter] = [MetricsLog(workdir, first_step=first_step)]
    if cfg.tensorboard:
        writers.append(TensorBoard(workdir, first_step=first_step))
    return Writers(writers)
