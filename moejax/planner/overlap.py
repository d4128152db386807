"""How much of what a step sends has compute beside it, from the scheduled HLO.

The text of a scheduled module is the order in which a device issues its instructions. An
asynchronous collective is on the wire from its start to its end (a TPU fuses it with the compute
beside it), any other while it stands there. The reader plays every computation once: one stream of
compute, one wire, data-sheet rates. A collective is hidden as far as its end finds it finished; the
rest is exposed, compute waits. The rates are those of the roofline: figures compare schedules, they
forecast no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from moejax.planner.collectives import Collective, Reader
from moejax.planner.cost import Cost, cost
from moejax.planner.hardware import Chip
from moejax.planner.hlo import (
    Body,
    Instruction,
    begins_collective,
    called_by,
    continues_collective,
    parse_computations,
    trips,
)
from moejax.planner.roofline import Near, wire_seconds


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Collectives of one kind over the same axes, inside loops (over layers) or outside.

    Attributes:
      kind, axes: as in `Collective`.
      in_loop: they stand in a loop's body.
      count: runs in a step.
      sent_bytes: what a device sends in all of them.
      async_bytes: the part of it that starts and ends apart, so that other work can go between.
      hidden_bytes: the part that is sent while compute goes on.
      seconds: time on the wire.
      exposed_s: the part of it for which compute waits.
      flops: FLOPs issued between start and end, one wire's work counted for all that share it.
    """

    kind: str
    axes: str
    in_loop: bool
    count: int
    sent_bytes: int
    async_bytes: int
    hidden_bytes: int
    seconds: float
    exposed_s: float
    flops: float


@dataclasses.dataclass
class _Transfer:
    """One collective on its way."""

    row: Collective  # of a single run
    end: float
    seconds: float
    flops: float = 0.0
    exposed: float = 0.0
    paired: bool = True


class _Player:
    """Plays computations; remembers what each transfer met."""

    def __init__(
        self, computations: dict[str, Body], read: Reader, near: Near, chip: Chip,
        peak_flops: float,
    ):  # fmt: skip
        self.computations, self.read, self.near = computations, read, near
        self.chip, self.peak_flops = chip, peak_flops
        self.done: list[tuple[_Transfer, int, bool]] = []

    def play(self, name: str, times: int, in_loop: bool) -> tuple[float, Cost]:
        """Runs a computation once and books its transfers `times` times: seconds, work."""
        body = self.computations.get(name, {})
        clock, wire, work = 0.0, 0.0, Cost(0.0, 0.0)
        flying: dict[str, _Transfer] = {}
        for found in body.values():
            if found.opcode.endswith("-done") or found.name.startswith("async-collective-done"):
                ended = flying.pop(_start_of(found, body), None)
                if ended is not None:
                    ended.exposed = min(max(ended.end - clock, 0.0), ended.seconds)
                    clock = max(clock, ended.end)
                continue
            sent = self._transfer(found, body, max(clock, wire))
            if sent is not None:
                wire = sent.end
                self.done.append((sent, times, in_loop))
                if begins_collective(found):
                    flying[found.name] = sent
                else:
                    sent.exposed, sent.paired, clock = sent.seconds, False, sent.end
                continue
            spent, new = self._run(found, body, times, in_loop)
            clock += spent
            work += new
            for one in flying.values():
                one.flops += new.flops
        return clock, work

    def _transfer(self, found: Instruction, body: Body, begin: float) -> _Transfer | None:
        if continues_collective(found):
            return None
        inside = [(found, body)]
        if found.opcode in ("async-start", "fusion"):
            bodies = [self.computations.get(name, {}) for name in called_by(found)]
            inside = [(one, fused) for fused in bodies for one in fused.values()]
        rows = [row for one, where in inside if (row := self.read(one, where)) is not None]
        if not rows:
            return None
        seconds = sum(wire_seconds(row, self.near, self.chip) for row in rows)
        row = dataclasses.replace(rows[0], sent_bytes=sum(one.sent_bytes for one in rows))
        return _Transfer(row, begin + seconds, seconds)

    def _run(self, found: Instruction, body: Body, times: int, in_loop: bool) -> tuple[float, Cost]:
        if found.opcode not in ("while", "conditional", "call"):
            new = cost(found, body, self.computations)
            return max(new.flops / self.peak_flops, new.bytes / self.chip.hbm_bytes_s), new
        count = trips(self.computations, body, found) if found.opcode == "while" else 1
        # What only the data decides (further rounds of an exchange) is not played.
        parts = [
            self.play(name, times * count, in_loop or found.opcode == "while")
            for name in called_by(found)
            if count
        ]
        if not parts:
            return 0.0, Cost(0.0, 0.0)
        if found.opcode == "conditional":
            return max(parts)
        spent = sum(seconds for seconds, _ in parts) * (count or 0)
        return spent, sum((work for _, work in parts), Cost(0.0, 0.0)).times(count or 0)


def _start_of(done: Instruction, body: Body) -> str:
    """Name of the instruction that began what `done` ends: back along the first operands."""
    found: Instruction | None = done
    while found is not None and found.operands and (found is done or not begins_collective(found)):
        found = body.get(found.operands[0])
    return found.name if found is not None else ""


def read_overlap(
    hlo: str, read: Reader, near: Near, chip: Chip, peak_flops: float
) -> list[Overlap]:
    """What a scheduled program hides of its collectives, the longest exposed first.

    Args:
      hlo: `compiled.as_text()` of a scheduled module.
      read: the collective that an instruction is, None for others (`collective_reader`).
      near: along each mesh axis, how many devices are on one host or slice.
      chip: memory and link rates.
      peak_flops: arithmetic rate.
    """
    computations, entry = parse_computations(hlo)
    player = _Player(computations, read, near, chip, peak_flops)
    player.play(entry, 1, False)
    return _table(player.done)


def _table(done: Iterable[tuple[_Transfer, int, bool]]) -> list[Overlap]:
    rows: dict[tuple[str, str, bool], Overlap] = {}
    for sent, times, in_loop in done:
        key = (sent.row.kind, sent.row.axes, in_loop)
        old = rows.get(key) or Overlap(*key, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        whole = times * sent.row.sent_bytes
        hidden = 1 - sent.exposed / sent.seconds if sent.seconds else 1.0
        rows[key] = Overlap(
            *key, old.count + times, old.sent_bytes + whole,
            old.async_bytes + whole * sent.paired, old.hidden_bytes + round(whole * hidden),
            old.seconds + times * sent.seconds, old.exposed_s + times * sent.exposed,
            old.flops + times * sent.flops,
        )  # fmt: skip
    return sorted(rows.values(), key=lambda row: -row.exposed_s)


def hidden_share(rows: Sequence[Overlap]) -> float:
    """Share of the sent bytes with compute beside it; 1 where nothing is sent."""
    sent = sum(row.sent_bytes for row in rows)
    return sum(row.hidden_bytes for row in rows) / sent if sent else 1.0
