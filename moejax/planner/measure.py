"""A compiled step run for real on simulated devices: what was measured beside what was compiled.

Arguments are counted from the arrays that live, working memory from what the process grows by,
collectives from a profile of the step, run by run and with the bytes of each. A simulated device is
a few threads and a part of this process's memory; pages that nothing writes are not resident, so
its working memory is measured from below.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moejax.planner.collectives import collective_reader
from moejax.planner.hlo import parse_computations, walk
from moejax.train.compile import Compiled
from moejax.train.state import Program, init_state
from moejax.train.step import batch_sharding


@dataclasses.dataclass(frozen=True)
class Measured:
    """One figure of a step, of one device.

    Attributes:
      what: `arguments`, `working memory`, or kind and mesh axes of a collective.
      compiled, measured: bytes; of collectives what a device sends.
      compiled_runs, measured_runs: of collectives; the average device's. 0 for memory.
      open_loop: the compiler does not know how often this runs, and counted one pass.
    """

    what: str
    compiled: float
    measured: float
    compiled_runs: float = 0
    measured_runs: float = 0
    open_loop: bool = False


def run_and_measure(program: Program, compiled: Compiled) -> list[Measured]:
    """Runs three steps from fresh weights on random tokens; the last two are measured.

    Args:
      program: of this process's CPU devices.
      compiled: its step.
    """
    state, batch = init_state(program, program.cfg.seed), _random_batch(program)
    facts = compiled.call.memory_analysis()
    argument_bytes = _live_bytes(jax.tree.leaves((state, batch)))
    with jax.set_mesh(program.mesh):
        state, _ = jax.block_until_ready(compiled.call(state, batch))
        _forget_peak()
        before = _resident("VmRSS")
        state, _ = jax.block_until_ready(compiled.call(state, batch))
        grown = (_resident("VmHWM") - before) / program.mesh.devices.size
        runs = _profiled(lambda: jax.block_until_ready(compiled.call(state, batch)))
    working = facts.output_size_in_bytes - facts.alias_size_in_bytes + facts.temp_size_in_bytes
    return [
        Measured("arguments", facts.argument_size_in_bytes, argument_bytes),
        Measured("working memory", working, grown),
        *_collectives(program, compiled.call.as_text(), runs),
    ]


def _random_batch(program: Program) -> dict[str, jax.Array]:
    """Rows of random tokens, each one document."""
    cfg = program.cfg
    micro = cfg.train.accumulation
    shape = micro, cfg.data.batch_size // micro, cfg.data.seq_len
    tokens = np.random.default_rng(cfg.seed).integers(0, cfg.model.vocab_size, shape, np.int32)
    labels = np.roll(tokens, -1, axis=-1)
    batch = {"tokens": tokens, "labels": labels, "segment_ids": np.ones_like(tokens)}
    return jax.device_put(batch, batch_sharding(program))


def _live_bytes(arrays: list[jax.Array]) -> int:
    """Bytes of these arrays on the fullest device."""
    held: collections.Counter = collections.Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def _forget_peak() -> None:
    """Gives freed memory back, and lets the kernel count the process's peak anew."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    """Bytes of this process that /proc knows as VmRSS (now) or VmHWM (at most)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s*(\d+)", status)[1])  # type: ignore[index]


def _profiled(call: Any) -> Mapping[str, int]:
    """How often each instruction ran on all devices together, by name, while `call` did."""
    runs: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="moejax-profile-") as folder:
        with jax.profiler.trace(folder):
            call()
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines:
                    runs.update(event.name for event in line.events)
    return runs


def _collectives(program: Program, hlo: str, runs: Mapping[str, int]) -> list[Measured]:
    mesh = program.mesh
    computations, entry = parse_computations(hlo)
    read = collective_reader(dict(mesh.shape))
    totals: dict[tuple[str, bool], np.ndarray] = {}
    counted: set[str] = set()
    for found, body, times, is_open in walk(computations, entry, 1, False):
        one = read(found, body)
        if one is None:
            continue
        # A computation that is called from two places is met twice; the profile has all its runs.
        ran = 0 if found.name in counted else runs.get(found.name, 0) / mesh.devices.size
        counted.add(found.name)
        sizes = [times * one.sent_bytes, ran * one.sent_bytes, times, ran]
        key = (f"{one.kind} over {one.axes}", is_open)
        totals[key] = totals.get(key, np.zeros(4)) + sizes
    rows = [
        Measured(what, sent, sent_really, times, ran, is_open)
        for (what, is_open), (sent, sent_really, times, ran) in totals.items()
    ]
    return sorted(rows, key=lambda row: (row.open_loop, -row.compiled))
