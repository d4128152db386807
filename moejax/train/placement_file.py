"""A placement as a JSON file, as `moejax place` writes it and `placement.file` names it."""

from __future__ import annotations

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
    """Writes a placement: a slot for every layer and expert, and what each device copies."""
    path = pathlib.Path(path)
    content = {
        "format": _FORMAT,
        "devices": placement.spread.devices,
        "slots": placement.slots_LE.tolist(),
        "copies": placement.copies_LPc.tolist(),
    }
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read_placement(path: str | os.PathLike[str], like: Placement) -> tuple[Placement, str]:
    """A placement, and the SHA-256 of its file.

    Args:
      path: the file.
      like: any placement of the model on the mesh that it is for; with another number of copies a
        device only the slots are taken.
    Raises:
      ConfigError: no such file, damaged, or for another model or mesh.
    """
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"placement.file={path} cannot be read: {error.strerror}.") from error
    slots, copies = _parsed(path, data)
    (L, E), devices = like.slots_LE.shape, like.spread.devices
    if slots.shape != (L, E) or copies.shape[:2] != (L, devices):
        raise ConfigError(
            f"placement.file={path} is for {len(slots)} layers of {slots.shape[-1]} experts on "
            f"{copies.shape[1]} devices; this run has {L} of {E} on mesh.expert={devices}. "
            f"Make one with `moejax place --devices={devices}`."
        )
    if np.any(np.sort(slots, 1) != np.arange(E)):
        raise ConfigError(f"placement.file={path} is damaged: its slots are no permutation.")
    if np.any((copies < 0) | (copies > E)) or _most_places(copies, E) > MAX_PLACES:
        raise ConfigError(
            f"placement.file={path} is damaged: it copies experts that are not there, or one to "
            f"more than {MAX_PLACES} devices."
        )
    if copies.shape != like.copies_LPc.shape:
        copies = like.copies_LPc
    return Placement(slots, copies), hashlib.sha256(data).hexdigest()


def _most_places(copies_LPc: np.ndarray, num_experts: int) -> int:
    """Devices of the expert that is on most of them."""
    flat = copies_LPc.reshape(len(copies_LPc), -1)
    return 1 + max(
        (np.bincount(row[row < num_experts], minlength=1).max() for row in flat), default=0
    )


def _parsed(path: Any, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = json.loads(data)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        slots = np.array(content["slots"], np.int32)
        devices = int(content["devices"])
        copies = np.array(content["copies"], np.int32).reshape(len(slots), devices, -1)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"placement.file={path} is no placement: {error or type(error).__name__}. "
            "`moejax place` writes one."
        ) from error
    return slots, copies
