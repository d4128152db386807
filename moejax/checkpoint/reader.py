"""Reading one step of a checkpoint: its JSON, its arrays onto any mesh, its damage in one line."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from moejax.checkpoint import integrity, layout
from moejax.checkpoint.layout import CheckpointError
from moejax.typing import PyTree

_JSON_FILE = "metadata"  # as Orbax's JsonCheckpointHandler calls it


class DamagedError(CheckpointError):
    """A step whose files cannot be read; `reason` says which and why."""

    def __init__(self, step_dir: pathlib.Path, reason: str):
        self.step_dir, self.reason = step_dir, reason
        super().__init__(f"checkpoint {step_dir} is damaged ({reason}).")


@contextlib.contextmanager
def _one_error_at_most() -> Iterator[None]:
    """Keeps a failing read to its exception.

    Reads run side by side in one event loop; when one fails the others are reported as never
    retrieved, each with a page of tensorstore settings.
    """
    loggers = [logging.getLogger(name) for name in ("asyncio", "absl")]
    levels, hook = [log.level for log in loggers], sys.unraisablehook
    for log in loggers:
        log.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = hook
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 160 else text[:157] + "..."


def _read(step_dir: pathlib.Path, **items: Any) -> Any:
    """Items of a step through Orbax; anything it raises means that the step is damaged."""
    try:
        with _one_error_at_most(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
            return orbax.restore(step_dir, args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax and tensorstore raise bare Exception for a short read.
        raise DamagedError(step_dir, _first_line(error)) from error


def read_meta(step_dir: pathlib.Path, *, verify: bool = True) -> dict[str, Any]:
    """The JSON of a step: format_version, step, config, position, metrics, leaves.

    Args:
      step_dir: the step.
      verify: compare all files of the step with their checksums first.

    Raises:
      DamagedError: its files are not those that were written.
      CheckpointError: it was written by another version of the format.
    """
    if not step_dir.is_dir():
        raise CheckpointError(f"no checkpoint at {step_dir}: the path does not exist.")
    if verify and (reason := integrity.damage(step_dir)):
        raise DamagedError(step_dir, reason)
    # The file itself and not through Orbax, whose restore waits for all processes of a run.
    try:
        meta = json.loads((step_dir / "meta" / _JSON_FILE).read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(step_dir, _first_line(error)) from error
    version = meta.get("format_version") if isinstance(meta, dict) else None
    if version != layout.FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {step_dir} has format_version {version}; this moejax reads "
            f"{layout.FORMAT_VERSION}. Use the moejax version that wrote it."
        )
    return meta


def read_arrays(step_dir: pathlib.Path, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Items `abstract` names, each in its given structure, dtype and sharding.

    Leaves of an item that `abstract` does not name are left on disk.

    Args:
      step_dir: the step.
      abstract: item name -> pytree of jax.ShapeDtypeStruct; one without a sharding goes to the
        first device. Already compared with what the step holds.
    """
    named = {item: layout.named_leaves(tree) for item, tree in abstract.items()}
    requests = {item: layout.nest(_placed(leaves)) for item, leaves in named.items()}
    arrays = _read(
        step_dir,
        **{
            item: ocp.args.PyTreeRestore(
                item=tree,
                restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                partial_restore=True,
            )
            for item, tree in requests.items()
            if tree
        },
    )
    out = {}
    for item, tree in abstract.items():
        leaves = layout.named_leaves(arrays[item]) if named[item] else {}
        out[item] = jax.tree.unflatten(
            jax.tree.structure(tree), [leaves[name] for name in named[item]]
        )
    return out


def _placed(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here
        )
        for name, leaf in leaves.items()
    }


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The resolved config saved with the newest (or the named) step at `path`."""
    directory, step = layout.locate(path)
    step = layout.steps_in(directory)[-1] if step is None else step
    return read_meta(directory / str(step), verify=False)["config"]


def has_part(step_dir: pathlib.Path, part: str) -> bool:
    """Whether a step holds leaves of this part of a state, `opt_state` say."""
    leaves = read_meta(step_dir, verify=False)["leaves"]
    return any(name.split("/")[0] == part for name in leaves)
