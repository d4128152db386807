"""Which temporaries are alive at the fullest moment of a step, from XLA's own dump."""

from __future__ import annotations

import dataclasses
import pathlib
import re

# What a compilation must be told to leave the files that are read here.
DUMP_OPTIONS = {"xla_dump_hlo_as_text": True}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A temporary that is alive at the peak.

    Attributes:
      size: bytes.
      type: HLO type of its largest value.
      source: the operation it is from, as JAX names it; an argument's name for a copy of one.
    """

    size: int
    type: str
    source: str


_ALLOCATION = re.compile(r"^\s*allocation (\d+): (.*)$")
_VALUE = re.compile(r"value: <\d+ ([\w.\-]+)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_LIVE = re.compile(r"^\s*([\w.\-]+)(\{[\d,]*\})?: (\d+) bytes")


def peak_buffers(folder: pathlib.Path) -> list[Buffer]:
    """Temporaries alive at the peak, largest first; values that share a place count once.

    Args:
      folder: what the compilation dumped into, also one that ran out of memory.
    """
    live_text, places_text, hlo = (
        _largest(folder, f"*after_optimizations{what}.txt")
        for what in ("-live-range", "-buffer-assignment", "")
    )
    places, sources = _temporaries(places_text), _sources(hlo)
    found: dict[tuple[str, int], Buffer] = {}
    for name in _live_at_peak(live_text):
        if name in places:
            allocation, offset, size, shape = places[name]
            new = Buffer(size, shape, sources.get(name.partition("{")[0], ""))
            old = found.get((allocation, offset), new)
            # A loop's result and what wrote it are one place: the writer says more.
            large, other = (new, old) if new.size > old.size else (old, new)
            said = max(large.source, other.source, key=lambda source: (bool(source), len(source)))
            found[allocation, offset] = dataclasses.replace(large, source=said)
    return sorted(found.values(), key=lambda buffer: -buffer.size)


def _largest(folder: pathlib.Path, pattern: str) -> str:
    """The step's file of that kind: the largest, as small programs are compiled on the way."""
    files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text(encoding="utf-8") if files else ""


def _live_at_peak(text: str) -> list[str]:
    names: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.rstrip().endswith("(peak):"):
            break
    for line in lines:
        match = _LIVE.match(line)
        if not match:
            break
        names.append(match.group(1) + (match.group(2) or "").replace("{}", ""))
    return names


def _temporaries(text: str) -> dict[str, tuple[str, int, int, str]]:
    """Value -> (allocation, offset, size, type), of allocations that are temporary."""
    out: dict[str, tuple[str, int, int, str]] = {}
    allocation, temporary = "", False
    for line in text.splitlines():
        header = _ALLOCATION.match(line)
        if header:
            allocation, temporary = header.group(1), "preallocated-temp" in header.group(2)
            continue
        value = _VALUE.search(line)
        # S(1) and up are a TPU's memories on the chip.
        if value and temporary and not re.search(r"S\([1-9]", value.group(5)):
            name, index, size, offset, shape = value.groups()
            plain = (index or "").replace("{}", "")
            out[name + plain] = (allocation, int(offset), int(size), shape)
    return out


def _sources(hlo: str) -> dict[str, str]:
    """Instruction -> the operation in JAX's words; a transposed argument has its argument's."""
    out: dict[str, str] = {}
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)", line)
        if not match:
            continue
        name, rest = match.groups()
        said = re.search(r'op_name="([^"]*)"', rest)
        operand = re.search(r"\(%([\w.\-]+)\)", rest)
        if said:
            out[name] = said.group(1).replace("\\'", "'")
        elif operand and operand.group(1) in out:
            out[name] = f"copy of {out[operand.group(1)]}"
    return out
