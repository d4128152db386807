"""Whether the files of a step are those that were written.

Tensorstore checks its index nodes but not array values: a flipped bit in a data file is read
back as a number. So size and CRC-32 of every file join a step before it is committed and are
compared before anything is read. An object store keeps checksums of its own, and reading a step
twice over a network is slow: there only sizes are compared.
"""

from __future__ import annotations

import json
import pathlib
import zlib

from moejax.checkpoint.layout import files_below, in_store, size_bytes

NAME = "checksums.json"
# Above this much a step is checked by file sizes alone: about 10 s of reading on one core.
CRC_LIMIT_BYTES = 8 << 30
_BLOCK_BYTES = 1 << 22


def _crc32(path: pathlib.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value


def write_checksums(step_dir: pathlib.Path) -> None:
    """Writes `checksums.json` of a step whose items (its sub-folders) are complete."""
    files = [p for item in step_dir.iterdir() if item.is_dir() for p in files_below(item)]
    sizes = [size_bytes(p) for p in files]
    hashed = sum(sizes) <= CRC_LIMIT_BYTES and not in_store(step_dir)
    entries = {
        p.relative_to(step_dir).as_posix(): [size, _crc32(p) if hashed else None]
        for p, size in zip(files, sizes, strict=True)
    }
    (step_dir / NAME).write_text(json.dumps(entries))


def damage(step_dir: pathlib.Path) -> str | None:
    """Why the step cannot be trusted, None when its files are intact.

    A step without `checksums.json` passes: the reader has the last word.
    """
    listing = step_dir / NAME
    if not listing.is_file():
        return None if (step_dir / "meta").is_dir() else "its meta folder is missing"
    try:
        entries = json.loads(listing.read_text())
    except (OSError, ValueError):
        return f"{NAME} cannot be read"
    for name, (size, crc) in entries.items():
        path = step_dir / name
        if not path.is_file():
            return f"file {name} is missing"
        if size_bytes(path) != size:
            return f"file {name} has {size_bytes(path)} bytes of {size}"
        if crc is not None and _crc32(path) != crc:
            return f"file {name} does not match its checksum"
    return None
