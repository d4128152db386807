"""A placement as a JSON file, as `moejax place` writes it and `placement.file` names it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.layers.moe.placement import MAX_PLACES, Placement

_FORMAT = "moejax expert placement 1"


def write_placement(path: str | os.PathLike[str], placement: Placement) -> None:
    """Writes a placement: a slot for every layer and expert, and what each device copies.

    Raises:
      ConfigError: nothing can be written there; nothing is left behind.
    """
    path = pathlib.Path(path)
    content = {
        "format": _FORMAT,
        "devices": placement.spread.devices,
        "slots": placement.slots_LE.tolist(),
        "copies": placement.copies_LPc.tolist(),
    }
    check_target(path)
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise ConfigError(
            f"the placement cannot be written to {path}: {error.strerror}. "
            "Name another file with --out=FILE."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def check_target(path: pathlib.Path) -> None:
    """Raises ConfigError where no file can be: at a folder, or in a folder that is not there."""
    if path.is_dir():
        raise ConfigError(
            f"--out={path} is a folder: name the file to write, such as "
            f"--out={path / 'placement.json'}."
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--out={path} cannot be written: there is no folder {path.parent}. Make it, or name "
            "a file in another one."
        )


def read_placement(path: str | os.PathLike[str], like: Placement) -> tuple[Placement, str]:
    """A placement, and the SHA-256 of its file.

    Args:
      path: the file.
      like: any placement of the model on the mesh that it is for, with as many copies a device as
        the run has; those beyond the file's own stay empty.
    Raises:
      ConfigError: no such file, damaged, for another model or mesh, or with more copies.
    """
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"placement.file={path} cannot be read: {error.strerror}. `moejax place` writes one."
        ) from error
    try:
        slots, copies = _parsed(data)
        _check_fits(path, Placement(slots, copies), like)
        _check_content(slots, copies)
    except _Damaged as error:
        raise ConfigError(
            f"placement.file={path} is no placement: {error}. `moejax place` writes one."
        ) from error
    missing = like.spread.copies - copies.shape[2]
    copies = np.pad(copies, ((0, 0), (0, 0), (0, missing)), constant_values=slots.shape[1])
    placement = Placement(slots.astype(np.int32), copies.astype(np.int32))
    return placement, hashlib.sha256(data).hexdigest()


class _Damaged(Exception):
    """What is wrong with a file, as a clause."""


def _check_fits(path: str | os.PathLike[str], found: Placement, like: Placement) -> None:
    (L, E), (devices, copies) = like.slots_LE.shape, like.spread
    layers, experts = found.slots_LE.shape
    if (layers, experts, found.spread.devices) != (L, E, devices):
        raise ConfigError(
            f"placement.file={path} is for {layers} layers of {experts} experts on "
            f"{found.spread.devices} devices; this run has {L} of {E} on mesh.expert={devices}. "
            f"Make one with `moejax place --devices={devices}`."
        )
    if found.spread.copies > copies:
        raise ConfigError(
            f"placement.file={path} has {found.spread.copies} copies a device, but "
            f"placement.copies={copies}. Set placement.copies={found.spread.copies}, or make a "
            f"file with `moejax place --devices={devices} --copies={copies}`."
        )


def _check_content(slots_LE: np.ndarray, copies_LPc: np.ndarray) -> None:
    (L, E), (_, P, _) = slots_LE.shape, copies_LPc.shape
    for layer, slots_E in enumerate(slots_LE):
        if np.any(np.sort(slots_E) != np.arange(E)):
            raise _Damaged(
                f"row {layer} of `slots` is no permutation: it must have each of 0 to {E - 1} once"
            )
    if np.any((copies_LPc < 0) | (copies_LPc > E)):
        raise _Damaged(f"`copies` must have experts 0 to {E - 1}, or {E} for none")
    holds_LPE = np.zeros((L, P, E + 1), np.int64)
    rows = np.arange(L)[:, None]
    holds_LPE[rows, slots_LE // (E // P), np.arange(E)] = 1
    np.add.at(holds_LPE, (rows[:, None], np.arange(P)[:, None], copies_LPc), 1)
    twice = np.argwhere(holds_LPE[..., :E] > 1)
    if len(twice):
        layer, device, expert = twice[0]
        raise _Damaged(
            f"row {layer} of `copies` repeats expert {expert} on device {device}, which has it "
            "already; a copy must be on another device"
        )
    if holds_LPE[..., :E].sum(1).max() > MAX_PLACES:
        raise _Damaged(f"`copies` puts an expert on more than {MAX_PLACES} devices")


def _parsed(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Slots [L, E] and copies [L, P, c], whole numbers of any size."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _Damaged("it is not JSON") from error
    if not isinstance(content, dict):
        raise _Damaged(f"it holds {_shown(content)} where an object with fields must be")
    for field in ("format", "devices", "slots", "copies"):
        if field not in content:
            raise _Damaged(f"it has no field `{field}`")
    if content["format"] != _FORMAT:
        raise _Damaged(f'`format` is {_shown(content["format"])}, and must be "{_FORMAT}"')
    devices = content["devices"]
    if type(devices) is not int or devices < 1:
        raise _Damaged(f"`devices` is {_shown(devices)}, and must be a whole number from 1")
    slots = _table(content, "slots", ("layer", "expert"))
    copies = _table(content, "copies", ("layer", "device", "copy"))
    if copies.shape[:2] != (len(slots), devices):
        raise _Damaged(
            f"`copies` is for {len(copies)} layers on {copies.shape[1]} devices, but `slots` for "
            f"{len(slots)} layers, and `devices` is {devices}"
        )
    return slots, copies


def _table(content: dict[str, Any], field: str, axes: tuple[str, ...]) -> np.ndarray:
    """The nested lists of a field as an array; its numbers must be whole."""
    value = content[field]
    wanted = f"`{field}` must have a whole number for each {', '.join(axes)}"
    try:
        table = np.array(value)
    except ValueError as error:
        raise _Damaged(f"{wanted}, but its lists differ in length or depth") from error
    if table.ndim != len(axes) or (table.size and table.dtype.kind != "i"):
        raise _Damaged(f"{wanted}, but is {_shown(value)}")
    return table


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
