"""Steps that must not count: what is one, what is kept of it, and what the run does next."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import ConfigError, TrainConfig
from moejax.train.diagnose import NonFiniteError

FOLDER = "bad_steps"
REPORT = "report.json"
# Losses reach the host one step late, and at milestones at once. A limit that only knows what is
# two steps old is the same in a run that was stopped and resumed in between.
_LATE = 2


class Rewind(Exception):
    """The run is to go back to its newest checkpoint, and on behind a bad batch.

    Attributes:
      data: position of the data iterator behind the bad batch.
      count: bad steps so far.
    """

    def __init__(self, why: str, data: Mapping[str, Any], count: int):
        super().__init__(why)
        self.data, self.count = dict(data), count


class BadSteps:
    """The count of bad steps of a run, the losses that a spike is told by, the folder of batches.

    The verdict itself is part of the compiled step: a bad one does not update, whoever looks when.
    """

    def __init__(
        self, cfg: TrainConfig, mesh: jax.sharding.Mesh, workdir: str | os.PathLike[str],
        saved: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        """
        Args:
          cfg: `bad_step`, `bad_step_limit`, `spike_factor` and `spike_window` are read.
          mesh: that the limit is put on.
          workdir: where the folder `bad_steps` goes.
          saved: what `position` gave to the checkpoint that is resumed.
        """
        self._cfg, self._everywhere = cfg, NamedSharding(mesh, P())
        self.folder = pathlib.Path(workdir) / FOLDER
        saved = saved or {}
        self.count = int(saved.get("count", 0))
        self._losses: list[tuple[int, float]] = [(int(s), x) for s, x in saved.get("losses", ())]

    def limit(self, step: int) -> float:
        """The loss above which `step` is bad; infinite where there is none."""
        known = [loss for at, loss in self._losses if at <= step - _LATE][-self._cfg.spike_window :]
        if not self._cfg.spike_factor or len(known) < self._cfg.spike_window:
            return math.inf
        return self._cfg.spike_factor * float(np.median(known))

    def highest_loss(self, step: int) -> tuple[jax.Array, ...]:
        """What the step takes beside state and batch; nothing where spikes are allowed."""
        if not self._cfg.spike_factor:
            return ()
        value = np.float32(self.limit(step))
        return (jax.make_array_from_callback((), self._everywhere, lambda _: value),)

    def good(self, step: int, loss: float) -> None:
        """Takes the loss of a step that counted."""
        if self._cfg.spike_factor:
            self._losses.append((step, loss))
            del self._losses[: -self._cfg.spike_window - _LATE]

    def position(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"count": self.count, "losses": [list(entry) for entry in self._losses]}

    def keep(self, step: int, rows: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> str:
        """Writes a bad batch, every process its rows, and the first one a report.

        A batch that cannot be written is told of and does not end the run.

        Args:
          step: its number.
          rows: int32 arrays [rows, T] of this process.
          facts: of JSON types; `facts["data"]` is the position behind the batch.
        Returns:
          Where it is, or why it is nowhere.
        """
        where = self.folder / f"step-{step:08d}-row-{facts['data']['rows']:012d}"
        try:
            where.mkdir(parents=True, exist_ok=True)
            own = where / f"rows-{jax.process_index():05d}.npz"
            _replace(own, lambda file: np.savez(file, allow_pickle=False, **rows))
            if jax.process_index() == 0:
                known = {"step": step, "processes": jax.process_count(), **_finite(facts)}
                text = json.dumps(known, indent=2, allow_nan=False) + "\n"
                _replace(where / REPORT, lambda file: file.write(text.encode()))
        except OSError as error:
            return f"not kept ({error.strerror or error})"
        return f"kept in {where}"

    def next(self, step: int, what: str, kept: str, data: Mapping[str, Any], newest: str) -> str:
        """Counts a bad step and decides.

        Returns:
          The line to print where the run goes on.
        Raises:
          Rewind: `train.bad_step` is rewind.
          NonFiniteError: there were too many.
        """
        self.count += 1
        policy, most = self._cfg.bad_step, self._cfg.bad_step_limit
        if self.count > most:
            raise NonFiniteError(
                f"{what} at step {step} is bad step {self.count} of this run, more than "
                f"train.bad_step_limit={most}; the last batch is {kept}; {newest}. Look at it by "
                "`moejax replay`, lower the learning rate, or raise the limit."
            )
        if policy == "rewind":
            raise Rewind(f"step {step}: {what} (batch {kept})", data, self.count)
        return f"step {step}: {what}, not applied ({self.count} of at most {most}); batch {kept}"


def bad_batches(workdir: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Folders of a run's bad batches that are complete, the oldest first."""
    found = pathlib.Path(workdir, FOLDER).glob(f"*/{REPORT}")
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def _joined(parts: list[np.ndarray], microbatches: int) -> np.ndarray:
    """Rows of all processes as the global batch, which is cut into microbatches first."""
    cut = [part.reshape(microbatches, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(cut, axis=1).reshape(-1, *parts[0].shape[1:])


def read_batch(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Report and rows of a bad batch, int32 arrays [rows, T] of all processes.

    Raises:
      ConfigError: it is not all there.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        parts = [folder / f"rows-{n:05d}.npz" for n in range(report["processes"])]
        loaded = [np.load(part, allow_pickle=False) for part in parts]
        names = loaded[0].files
        cut = report["microbatches"]
        rows = {name: _joined([part[name] for part in loaded], cut) for name in names}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} holds no whole batch of a bad step: {error}.") from error
    return report, rows


def _finite(value: Any) -> Any:
    """JSON has no NaN: it becomes its name."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: pathlib.Path, write: Any) -> None:
    """A whole file or none."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        write(file)
    os.replace(scratch, path)
