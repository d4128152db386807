"""Tokens of every expert of every layer, as a run records them beside its metrics.

`<workdir>/expert_loads.jsonl` holds a line of facts and then one line a period:

    {"format": "moejax expert loads 1", "layers": [1, 2, 3], "experts": 16}
    {"first": 1, "step": 10, "counts": "eJzt..."}

`layers` are the numbers of the layers with experts; `first` to `step`, both included, are the
steps that the counts are summed over; `counts` is base64 of zlib of the [layers, experts] integers,
as the lowest bytes of all of them, then the next bytes, eight times (unsigned, little endian). A
period has `log.loads_every` steps, and ends early where a checkpoint is saved: a resumed run so
drops whole periods, and its records have each step once. For Kimi K3 (92 layers of 896 experts) a
line is 0.27 MB and takes 10 ms.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.config import ConfigError
from moejax.observability.metrics import unwritable
from moejax.typing import Int

LOADS_FILE = "expert_loads.jsonl"
_FORMAT = "moejax expert loads 1"
_BYTES = 8


class Loads(NamedTuple):
    """What a run recorded, oldest first.

    Attributes:
      steps: int64 [R], the last step of each record.
      counts: int64 [R, layers, experts], tokens of each expert, summed over the record's steps.
      first: int64 [R], the first step of each record.
      layers: numbers of the layers with experts, as many as `counts` has.
    """

    steps: Int[np.ndarray, " R"]
    counts: Int[np.ndarray, "R layers experts"]
    first: Int[np.ndarray, " R"]
    layers: tuple[int, ...]

    def last(self, num_steps: int) -> Int[np.ndarray, "layers experts"]:
        """Counts summed over the newest records that together have at least `num_steps` steps.

        Over all of them where there are fewer.
        """
        return self.counts[self.steps > self.steps[-1] - num_steps].sum(0)


def relative(counts: Int[np.ndarray, "*X experts"]) -> np.ndarray:
    """Load over the mean of its layer, float64: 1 is even, 0 an idle expert; 0 without a token."""
    mean = counts.mean(-1, keepdims=True)
    return counts / np.where(mean > 0, mean, 1)


def _encode(counts_LE: np.ndarray) -> str:
    planes = np.ascontiguousarray(counts_LE, "<u8").reshape(-1).view(np.uint8).reshape(-1, _BYTES)
    return base64.b64encode(zlib.compress(planes.T.tobytes(), 6)).decode("ascii")


def _decode(text: str, shape: tuple[int, int]) -> np.ndarray:
    """Raises ValueError where the text is damaged, or of another shape."""
    size = _BYTES * shape[0] * shape[1]
    # No more than a record can hold is unpacked, whatever the text claims.
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True), size + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError("its counts cannot be unpacked") from error
    if len(data) != size or not unpacker.eof:
        raise ValueError(f"not the counts of {shape[0]} layers of {shape[1]} experts")
    planes = np.frombuffer(data, np.uint8).reshape(_BYTES, -1)
    return np.ascontiguousarray(planes.T).view("<u8").reshape(shape).astype(np.int64)


def parsed_lines(path: pathlib.Path) -> Iterator[tuple[int, str, Any]]:
    """(number, text, its value or the error) of each line of a file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("no mapping")
            except ValueError as error:
                value = error
            yield number, line, value


def _facts(value: Any) -> tuple[list[int], int] | None:
    """Layers and experts out of the first line; None where it is none."""
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        return None
    layers, experts = value.get("layers"), value.get("experts")
    whole = isinstance(layers, list) and all(type(x) is int for x in [*layers, experts])
    return (layers, experts) if whole and layers and experts > 0 else None  # type: ignore


def read_loads(workdir: str | os.PathLike[str]) -> Loads:
    """The recorded loads of a run.

    Args:
      workdir: the run's folder, or the file itself.
    Raises:
      ConfigError: there is no record yet, or a line is damaged; the last one may be cut short, as
        a killed process leaves it.
    """
    path = pathlib.Path(workdir)
    path = path / LOADS_FILE if path.is_dir() else path
    lines = parsed_lines(path)
    try:
        facts = _facts(next(lines, (0, "", None))[2])
    except OSError as error:
        raise ConfigError(
            f"no expert loads at {path}: {error.strerror}. Runs with log.loads_every > 0 and "
            "layers with experts write them."
        ) from error
    if facts is None:
        raise ConfigError(
            f"{path} is no file of expert loads, or damaged: its first line does not name format, "
            "layers and experts. Give the file as the run wrote it, or move it away."
        )
    layers, experts = facts
    records: list[tuple[int, int, np.ndarray]] = []
    for number, line, value in lines:
        try:
            records.append(_record(value, (len(layers), experts), records))
        except ValueError as error:
            if not line.endswith("\n"):  # only the last line of a file has no end
                break
            raise ConfigError(
                f"{path}, line {number}, is damaged: {error}. Take the line out to use the rest."
            ) from error
    if not records:
        raise ConfigError(f"{path} holds no record yet.")
    first, steps, counts = zip(*records, strict=True)
    return Loads(np.array(steps), np.stack(counts), np.array(first), tuple(layers))


def layer_numbers(workdir: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Numbers in the model of a run's layers with experts, from its loads or else its config.

    None where neither can be read.
    """
    try:
        with (pathlib.Path(workdir) / LOADS_FILE).open(encoding="utf-8") as file:
            facts = _facts(json.loads(file.readline()))
        if facts is not None:
            return tuple(facts[0])
    except (OSError, ValueError):
        pass
    try:
        model = json.loads((pathlib.Path(workdir) / "config.json").read_text("utf-8"))["model"]
        return tuple(range(model["ffn"]["num_dense_layers"], model["num_layers"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _record(value: Any, shape: tuple[int, int], before: list) -> tuple[int, int, np.ndarray]:
    """First step, last step and counts of a parsed line; ValueError where it cannot follow."""
    if isinstance(value, Exception):
        raise ValueError("it is no whole JSON mapping")
    first, step, text = (value.get(name) for name in ("first", "step", "counts"))
    if type(first) is not int or type(step) is not int or not isinstance(text, str):
        raise ValueError("it lacks first, step or counts")
    done = before[-1][1] if before else 0
    if not done < first <= step:
        raise ValueError(f"steps {first} to {step} after step {done}")
    return first, step, _decode(text, shape)


class LoadLog:
    """Sums the loads of a period and appends them to `<workdir>/expert_loads.jsonl`."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        layers: Sequence[int],
        num_experts: int,
        *,
        every: int,
        first_step: int | None = None,
    ):
        """
        Args:
          workdir: made if it is missing.
          layers: numbers of the layers with experts.
          num_experts: of each.
          every: a period ends at each multiple of this many steps.
          first_step: the first step that will be added; records of that step and later ones, left
            by the run that is being resumed, are removed. None starts from an empty file.
        Raises:
          ConfigError: the file cannot be written.
        """
        self.path = pathlib.Path(workdir) / LOADS_FILE
        self._every = every
        self._first: int | None = None
        self._step = 0
        self._sum_LE = np.zeros((len(layers), num_experts), np.int64)
        facts = {"format": _FORMAT, "layers": list(layers), "experts": num_experts}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(json.dumps(facts) + "\n", 0 if first_step is None else first_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _begin(self, facts: str, first_step: int) -> None:
        """The file with its facts, and the records before `first_step` if they have the same."""
        scratch = self.path.with_name(f"{self.path.name}.tmp")
        with scratch.open("w", encoding="utf-8") as file:
            file.write(facts)
            for number, line, value in parsed_lines(self.path) if self.path.exists() else ():
                if number == 1 and line != facts:
                    break
                step = value.get("step") if isinstance(value, dict) else None
                if number > 1 and type(step) is int and step < first_step:
                    file.write(line.rstrip("\n") + "\n")
        os.replace(scratch, self.path)

    def add(self, step: int, load_LE: Any) -> None:
        """Takes the tokens [layers, experts] of a step; writes where its period ends."""
        self._first = step if self._first is None else self._first
        self._step = step
        self._sum_LE += np.asarray(load_LE, np.int64)
        if step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Ends the period here.

        Raises:
          ConfigError: the disk is full, or gone.
        """
        if self._first is None:
            return
        row = {"first": self._first, "step": self._step, "counts": _encode(self._sum_LE)}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._first = None
        self._sum_LE[:] = 0

    def close(self) -> None:
        """Closes the file without an unfinished period, which a resumed run repeats."""
        self._file.close()
