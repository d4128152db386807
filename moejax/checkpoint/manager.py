"""Checkpoints of a run: asynchronous, atomic, bounded in number, restored onto any mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from moejax.checkpoint import integrity, layout, reader
from moejax.checkpoint.layout import CheckpointError
from moejax.config import CheckpointConfig
from moejax.typing import PyTree

_BEST_METRIC = "eval_loss"


# Orbax counts by the clock, so that one that is set an hour ahead would fail the save in progress.
# As long as its timers can be in milliseconds; processes that are gone are found by other means.
_PATIENCE_S = 20 * 24 * 3600
# What Orbax prints, in pages, of an error that `wait` raises too.
_COMMIT = "Handler Commit operations"
_TOLD_TWICE = ("_SignalingThread.run() raised", _COMMIT, "save_finalize")
# How often a process that waits for its save looks whether it has failed.
_LOOK_S = 0.1
# What this process's save in progress has failed with. Orbax keeps it to itself until all processes
# have met at the end of the save, to which those that wait for the failed one's files never come.
_failed: list[BaseException] = []


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if _COMMIT in text and record.exc_info and record.exc_info[1] is not None:
        _failed.append(record.exc_info[1])
    return not any(words in text for words in _TOLD_TWICE)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored step. Unpacks as `state, position, config`.

    Attributes:
      state: the state, in the structure and on the mesh that was asked for.
      position: where the data iterator stood.
      config: the resolved config it was saved with (tuples have become lists).
      step: the step that was read.
      warning: one line when it is not the newest step, else None.
    """

    state: PyTree
    position: Any
    config: dict[str, Any]
    step: int
    warning: str | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.state, self.position, self.config))


class Checkpoints:
    """The checkpoints of one run, under `<workdir>/checkpoints/<step>` or `checkpoint.dir`.

    Nothing is written before the first `save`; reading leaves the folder as it is.
    """

    def __init__(self, workdir: str | pathlib.Path, cfg: CheckpointConfig | None = None):
        """
        Args:
          workdir: the run's folder, or its `checkpoints` folder.
          cfg: period, number kept, whether the best is kept, whether saving is asynchronous,
            and the folder of steps where it is not the workdir's.
        """
        self._cfg = cfg or CheckpointConfig()
        self.directory = (
            layout.as_path(self._cfg.dir) if self._cfg.dir else layout.checkpoints_dir(workdir)
        )
        self._manager: ocp.CheckpointManager | None = None
        self._keep = _Keep(self._cfg)
        self._saved: set[int] = set()
        self._saving: int | None = None
        self._damaged: set[int] = set()

    def all_steps(self) -> list[int]:
        """Finished steps, ascending. Raises CheckpointError where a store does not answer."""
        with self._told("read from"):
            return layout.steps_in(self.directory)

    def latest_step(self) -> int | None:
        """The newest finished step, None without one."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The saved step with the lowest evaluation loss, None when none was evaluated."""
        return _Keep(self._cfg, self._read_losses()).best(self.all_steps())

    def best_loss(self) -> float:
        """The lowest evaluation loss of a saved step, infinite when none was evaluated."""
        return min(self._read_losses().values(), default=math.inf)

    def due(self, step: int) -> bool:
        """Whether `checkpoint.every` asks for a save after this step."""
        return self._cfg.every > 0 and step > 0 and step % self._cfg.every == 0

    def path(self, step: int) -> pathlib.Path:
        """Folder of a step."""
        return self.directory / str(step)

    def save(
        self,
        step: int,
        state_tree: Mapping[str, PyTree],
        *,
        position: Any,
        config: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step; returns once the arrays are copied, so that they may be donated.

        A step on disk from an earlier run (a damaged one, or one passed again after going back)
        is replaced.

        Args:
          step: number of finished training steps.
          state_tree: {"params": ..., other parts}: pytrees of arrays on any mesh.
          position: data iterator state, of JSON types and bytes.
          config: resolved config as nested dictionaries.
          metrics: `eval_loss`, when present and finite, decides which step is the best.
          force: save again a step that this object has saved already.
        Returns:
          Whether it was saved; False for a step saved before.
        Raises:
          CheckpointError: the folder cannot be written, or the save before this one failed.
        """
        if step in self._saved and not force:
            return False
        metrics = {k: v for k, v in (metrics or {}).items() if isinstance(v, int | float)}
        meta = {
            "format_version": layout.FORMAT_VERSION,
            "step": step,
            "config": layout.to_json(config),
            "position": layout.to_json(position),
            "metrics": {k: float(v) for k, v in metrics.items() if math.isfinite(v)},
            "leaves": layout.describe(state_tree),
        }
        self.wait()
        with self._told("written to", OSError, ValueError):
            self._write(step, state_tree, meta)
        if not self._cfg.asynchronous:
            self.wait()
        return True

    def _write(self, step: int, state_tree: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        manager = self._open()
        if step in manager.all_steps():
            manager.delete(step)
        self._keep.losses[step] = meta["metrics"].get(_BEST_METRIC, math.inf)
        self._saving = step
        _failed.clear()
        items = {
            item: ocp.args.PyTreeSave(layout.nest(layout.named_leaves(tree)))
            for item, tree in _split(state_tree).items()
            if jax.tree.leaves(tree)
        }
        args = ocp.args.Composite(meta=ocp.args.JsonSave(meta), **items)
        # The loop decides when; without force Orbax would skip steps below its newest.
        manager.save(step, args=args, force=True)
        self._saved.add(step)

    def restore(
        self, step: int | None, abstract_state_tree: Mapping[str, PyTree], *, fallback: bool = False
    ) -> Restored:
        """Reads a step onto the mesh of `abstract_state_tree`.

        Args:
          step: which one; None is the newest.
          abstract_state_tree: what `save` was given, as jax.ShapeDtypeStruct with shardings.
          fallback: when the newest step is damaged, go on to the one before (never when `step`
            is given), and set the damaged ones aside at the next save.
        Raises:
          CheckpointError: no checkpoint, a damaged one (the line offers the previous good one),
            other leaves or shapes, another format version.
        """
        self.wait()
        if step is not None:
            return self._restore_step(step, abstract_state_tree)
        directory, _ = layout.locate(self.directory)
        bad: list[reader.DamagedError] = []
        for candidate in reversed(layout.steps_in(directory)):
            try:
                restored = self._restore_step(candidate, abstract_state_tree)
            except reader.DamagedError as error:
                if not fallback:
                    raise CheckpointError(self._offer(error)) from error
                bad.append(error)
                continue
            self._damaged = {int(error.step_dir.name) for error in bad}
            warning = " ".join(map(str, bad)) + f" Going on from {self.path(candidate)}."
            return dataclasses.replace(restored, warning=warning if bad else None)
        raise CheckpointError(f"{bad[0]} No earlier checkpoint can be read either.")

    def _restore_step(self, step: int, abstract: Mapping[str, PyTree]) -> Restored:
        where = self.path(step)
        if not where.is_dir() and self.all_steps():
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.directory}: it has {self.all_steps()}."
            )
        meta = reader.read_meta(where)
        layout.check_leaves(str(where), meta["leaves"], layout.describe(abstract))
        items = reader.read_arrays(where, _split(abstract))
        position = layout.from_json(meta["position"])
        return Restored(_join(items, abstract), position, meta["config"], step)

    def verify(self, step: int) -> None:
        """Raises CheckpointError when the files of a step are not those that were written.

        The line offers the previous good step.
        """
        if reason := integrity.damage(self.path(step)):
            raise CheckpointError(self._offer(reader.DamagedError(self.path(step), reason)))

    def _offer(self, error: reader.DamagedError) -> str:
        bad = int(error.step_dir.name)
        for step in reversed([s for s in self.all_steps() if s < bad]):
            if integrity.damage(self.path(step)) is None:
                return f"{error} The previous one is {self.path(step)}: delete {bad} to use it."
        return f"{error} There is no earlier one: delete {bad} to start anew."

    @staticmethod
    def restore_parts(
        path: str | pathlib.Path, abstract: Mapping[str, PyTree]
    ) -> dict[str, PyTree]:
        """Some parts of a state, from a workdir, a folder of steps (its newest), or one step.

        Dtypes are those of `abstract`, whatever was saved.

        Args:
          path: where.
          abstract: {"params": ...} and any other parts, as for `restore`; the rest is not read.
        Raises:
          CheckpointError: as `restore`.
        """
        directory, step = layout.locate(path)
        source = Checkpoints(directory)
        where = source.path(layout.steps_in(directory)[-1] if step is None else step)
        try:
            saved = reader.read_meta(where)["leaves"]
            saved = {name: leaf for name, leaf in saved.items() if name.split("/")[0] in abstract}
            layout.check_leaves(str(where), saved, layout.describe(abstract), dtypes=False)
            return _join(reader.read_arrays(where, _split(abstract)), abstract)
        except reader.DamagedError as error:
            raise CheckpointError(source._offer(error)) from error

    @staticmethod
    def restore_weights(path: str | pathlib.Path, abstract_params: PyTree) -> PyTree:
        """Only the weights; see `restore_parts`."""
        return Checkpoints.restore_parts(path, {"params": abstract_params})["params"]

    def wait(self) -> None:
        """Returns when the save in progress is on disk. Raises CheckpointError if it failed."""
        if self._manager is None:
            return
        with self._told("written to", OSError, ValueError):
            if jax.process_count() == 1:
                self._manager.wait_until_finished()
            else:
                self._wait_among_several(self._manager)

    def check(self) -> None:
        """Raises CheckpointError if this process's save in progress has failed already."""
        with self._told("written to", OSError, ValueError):
            if _failed and self._saving is not None:
                raise _failed[0]

    def _wait_among_several(self, manager: ocp.CheckpointManager) -> None:
        """Waits, but not for those that wait for what this process could not write."""
        ended: list[BaseException | None] = []

        def wait() -> None:
            try:
                manager.wait_until_finished()
                ended.append(None)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=wait, name="save in progress", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            self.check()
        if ended[0] is not None:
            raise ended[0]

    def close(self) -> None:
        """Finishes the save in progress and frees the threads."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _open(self) -> ocp.CheckpointManager:
        """The writing manager, made at the first save: it clears what a killed save left."""
        self._set_aside()
        if self._manager is None:
            logging.getLogger("absl").addFilter(_is_news)  # once, however often it is added
            self.directory.mkdir(parents=True, exist_ok=True)
            self._keep.losses = self._read_losses()
            options = ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(
                    timeout_secs=_PATIENCE_S,
                    post_finalization_callback=self._seal,
                    # In a thread it fails unseen, and all wait five minutes for its word.
                    create_directories_asynchronously=False,
                ),
                preservation_policy=self._keep,
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager

    def _seal(self) -> None:
        """Adds the checksums to the step being finished.

        Orbax calls this on its saving thread when all files are written and before it renames the
        step, so that the checksums are part of the same atomic commit.
        """
        if jax.process_index() == 0:
            name = str(self._saving)
            if not layout.in_store(self.directory):  # where it has its name from the beginning
                name += ".orbax-checkpoint-tmp*"
            for unfinished in self.directory.glob(name):
                integrity.write_checksums(unfinished)

    def _set_aside(self) -> None:
        """Renames the damaged steps a fall-back passed over: they count as steps no more.

        In a store, where every object of a step would be copied, they lose the mark that they are
        whole, and Orbax clears them with what killed saves have left.
        """
        damaged, self._damaged = self._damaged, set()
        for step in damaged if jax.process_index() == 0 else ():
            if layout.in_store(self.directory):
                (self.path(step) / layout.COMMITTED).unlink(missing_ok=True)
                continue
            target = self.directory / f"{step}.damaged"
            if self.path(step).exists() and not target.exists():
                self.path(step).rename(target)
        if damaged and self._manager is not None:
            self._manager.reload()

    def _read_losses(self) -> dict[int, float]:
        """Evaluation loss of each step on disk that can be read and has one."""
        losses = {}
        for step in self.all_steps():
            try:
                meta = reader.read_meta(self.path(step), verify=False)
                losses[step] = meta["metrics"][_BEST_METRIC]
            except (CheckpointError, KeyError):
                continue
        return losses

    @contextlib.contextmanager
    def _told(self, how: str, *kinds: type[Exception]) -> Iterator[None]:
        """Makes one line of errors of some kinds, and of a store's, which has kinds of its own."""
        try:
            yield
        except jax.errors.JaxRuntimeError:  # of another process that is gone
            raise
        except Exception as error:
            if isinstance(error, CheckpointError) or not (
                isinstance(error, kinds) or layout.in_store(self.directory)
            ):
                raise
            lines = (getattr(error, "strerror", None) or str(error)).splitlines()
            reason = (lines or [type(error).__name__])[0].rstrip(".")
            line = f"checkpoints cannot be {how} {self.directory}: {reason}."
            raise CheckpointError(line) from error


class _Keep:
    """Which steps stay: the newest `keep`, multiples of `keep_every`, the best."""

    def __init__(self, cfg: CheckpointConfig, losses: dict[int, float] | None = None):
        self._cfg = cfg
        self.losses = losses or {}

    def best(self, steps: Sequence[int]) -> int | None:
        """The step of lowest evaluation loss, the later of equals."""
        known = [s for s in steps if math.isfinite(self.losses.get(s, math.inf))]
        return min(known, key=lambda s: (self.losses[s], -s), default=None)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question: for each checkpoint, oldest first, whether it stays."""
        steps = [info.step for info in checkpoints]
        kept = set(sorted(steps)[-self._cfg.keep :])
        if self._cfg.keep_every:
            kept |= {s for s in steps if s % self._cfg.keep_every == 0}
        if self._cfg.keep_best:
            kept.add(self.best(steps))
        return [s in kept for s in steps]


def _split(state_tree: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Weights lie apart, so that a new run can read them alone."""
    rest = {key: tree for key, tree in state_tree.items() if key != "params"}
    return {"params": state_tree["params"], "rest": rest}


def _join(items: Mapping[str, PyTree], like: Mapping[str, PyTree]) -> dict[str, PyTree]:
    parts = {"params": items["params"], **items["rest"]}
    return {key: parts[key] for key in like}
