"""Experts in other slots while a run trains: moved in place, and back in order in what is saved.

In the arrays of a run, slot and expert differ as its :class:`Placement` says; `ffn.places` (and,
with copies, `ffn.sources`) in the balancing state tell the layers. Checkpoints hold weights, their
average and the optimizer's state in the order of the experts' numbers, and the placement beside the
data position: one atomic step holds both, any mesh resumes from it, and no reader of checkpoints
knows of placements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from moejax.layers.moe.placement import (
    Placement,
    Spread,
    canonical,
    device_loads,
    imbalance,
    place,
    place_tables,
)
from moejax.models.grouping import Segment
from moejax.models.parts import model_parts
from moejax.partitioning import ParamInfo
from moejax.partitioning.expert_exchange.relocate import relocate
from moejax.train.placement_file import read_placement
from moejax.train.state import Program, TrainState

PLACES = ("places", "sources")  # of `ffn` in the balancing state, as `place_tables` gives them


def with_places(program: Program, spread: Spread) -> Program:
    """The program of a run whose experts may lie anywhere; its state also has `ffn.places`."""
    parts = model_parts(program.cfg.model, **{**program.parts.options, "spread": spread})
    whole = jax.tree.map(lambda _: program.shardings.step, parts.balance)
    return program._replace(
        parts=parts,
        abstract=program.abstract._replace(balance=parts.balance),
        shardings=program.shardings._replace(balance=whole),
    )


def apply_placement(
    program: Program, state: TrainState, old: Placement, new: Placement
) -> TrainState:
    """The state with its experts moved from one placement to another, and its places set.

    Moves weights, optimizer state and averages: every leaf with the logical axis ``experts``, one
    after the other, each in the place of the one before it. Only bits move, so applying a
    placement and then the old one gives the same state back.

    Args:
      program: of :func:`with_places`.
      state: consumed: arrays that move are donated.
      old: the placement that `state` is in.
      new: the one it is to be in.
    """
    source_LE = np.zeros_like(new.slots_LE)
    np.put_along_axis(source_LE, new.slots_LE, old.slots_LE, 1)
    layers = _moe_runs(program)
    infos = dict(jax.tree_util.tree_leaves_with_path(program.parts.infos))

    def moved(path: tuple, leaf: jax.Array, where: Any) -> jax.Array:
        tail = next((path[i:] for i in range(len(path)) if path[i:] in infos), ())
        info: ParamInfo | None = infos.get(tail)
        if info is None or "experts" not in info.axes:
            return leaf
        source_XE = source_LE[layers[tail[0].key, tail[1].key]]
        if np.array_equal(source_XE, np.tile(np.arange(source_XE.shape[1]), (len(source_XE), 1))):
            return leaf
        return _mover(where, info.stack + info.axes.index("experts"))(leaf, source_XE)

    arrays = {"params": state.params, "opt_state": state.opt_state}
    places = {"params": program.shardings.params, "opt_state": program.shardings.opt_state}
    arrays = jax.tree_util.tree_map_with_path(moved, arrays, places)
    return state._replace(**arrays, balance=set_places(program, state.balance, new))


@functools.cache
def _mover(where: jax.sharding.NamedSharding, dim: int) -> Callable:
    return jax.jit(
        lambda leaf, source_XE: relocate(leaf, source_XE, dim, where),
        out_shardings=where,
        donate_argnums=0,
    )


def _moe_runs(program: Program) -> dict[tuple[str, str], np.ndarray]:
    """Rows of a [layers, ...] table for each run with experts, by the names of stack and run."""
    row_of = {layer: row for row, layer in enumerate(program.parts.moe_layers())}
    rows = {}
    for s, segment in enumerate(program.parts.segments):
        for r, numbers in enumerate(_layer_numbers(segment)):
            if segment.runs[r].kind.ffn == "moe":
                rows[f"stack{s}", f"run{r}"] = np.array([row_of[n] for n in numbers])
    return rows


def _layer_numbers(segment: Segment) -> list[list[int]]:
    """Numbers of each run's layers, as their leaves stack them."""
    starts, numbers = [segment.first + i * segment.period for i in range(segment.repeats)], []
    for run in segment.runs:
        numbers.append([start + i for start in starts for i in range(run.count)])
        starts = [start + run.count for start in starts]
    return numbers


def set_places(program: Program, balance: dict, placement: Placement) -> dict:
    """The balancing state with what the layers read of a placement; other leaves as they are."""
    out = jax.tree.map(lambda leaf: leaf, balance)  # fresh dicts
    tables = dict(zip(PLACES, place_tables(placement), strict=True))
    for (stack, run), rows in _moe_runs(program).items():
        wanted = program.abstract.balance[stack][run]["ffn"]
        where = program.shardings.balance[stack][run]["ffn"]
        for name in wanted.keys() & set(PLACES):
            table = tables[name][rows].reshape(wanted[name].shape)
            out[stack][run]["ffn"][name] = jax.device_put(table, where[name])
    return out


def without_places(balance: dict) -> dict:
    """The balancing state as it is saved."""
    return {
        key: without_places(value) if isinstance(value, dict) else value
        for key, value in balance.items()
        if key not in PLACES
    }


class Placer:
    """The placement of a run: where its experts are, the loads since it was made, and when anew.

    Attributes:
      program: the run's program, whose state has places.
      placement: where the experts are.
    """

    def __init__(self, plain: Program):
        """
        Args:
          plain: the run's program as checkpoints know it.
        Raises:
          ConfigError: `placement.file` cannot be used.
        """
        cfg, devices = plain.cfg, plain.mesh.shape["expert"]
        copies = cfg.placement.copies if devices > 1 else 0
        self._every = cfg.placement.every
        self.program = with_places(plain, Spread(devices, copies))
        self._plain = canonical(
            len(plain.parts.moe_layers()), cfg.model.moe.num_experts, Spread(devices, copies)
        )
        self.placement = self._plain
        self._file, self._sha = None, ""
        if cfg.placement.file:
            self._file, self._sha = read_placement(cfg.placement.file, self._plain)
        self._loads = np.zeros(self._plain.slots_LE.shape, np.int64)

    def begin(self, state: TrainState, saved: Mapping[str, Any] | None) -> TrainState:
        """A state in the order of the experts' numbers, placed as the run was or the file says.

        Args:
          state: as checkpoints hold it; consumed.
          saved: what :meth:`position` gave when it was saved; None without that.
        """
        saved = saved or {}
        target = self._plain
        if saved:
            self._loads = np.array(saved["loads"], np.int64)
            target = target._replace(slots_LE=np.array(saved["slots"], np.int32))
            copies = np.array(saved["copies"], np.int32)
            if copies.shape == target.copies_LPc.shape:  # another mesh begins without copies
                target = target._replace(copies_LPc=copies)
        if self._file is not None and saved.get("file") != self._sha:
            target = self._file
        self.placement = target
        return apply_placement(self.program, state, self._plain, target)

    def position(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike, in JSON types."""
        return {
            "slots": self.placement.slots_LE.tolist(),
            "copies": self.placement.copies_LPc.tolist(),
            "loads": self._loads.tolist(),
            "file": self._sha,
        }

    def observe(self, load_LE: np.ndarray) -> np.ndarray:
        """Adds a step's tokens [layers, experts]; the fullest device's load over the mean [L]."""
        self._loads += np.asarray(load_LE, np.int64)
        return imbalance(device_loads(load_LE, self.placement))

    def due(self, step: int) -> bool:
        """Whether `placement.every` asks for a new placement after this step."""
        return self._every > 0 and step % self._every == 0

    def renew(self, state: TrainState) -> tuple[TrainState, str]:
        """Places by the loads since the last time; `state` is consumed. Also a line of it."""
        new = place(self._loads, self.placement.spread, self.placement)
        both = self.placement, new
        before, after = (imbalance(device_loads(self._loads, p)) for p in both)
        line = (
            f"experts placed by {int(self._loads.sum()):,} choices: the fullest device has "
            f"{after.max():.3f} times the mean (before: {before.max():.3f}), averaged over layers "
            f"{after.mean():.3f} (before: {before.mean():.3f})"
        )
        state = apply_placement(self.program, state, *both)
        self.placement = new
        self._loads[:] = 0
        return state, line

    def in_order(self, state: TrainState) -> TrainState:
        """The state in the order of the experts' numbers; consumes it. :meth:`again` undoes it."""
        return apply_placement(self.program, state, self.placement, self._plain)

    def again(self, state: TrainState) -> TrainState:
        """The state of :meth:`in_order`, placed as before; consumes it."""
        return apply_placement(self.program, state, self._plain, self.placement)


def open_placer(program: Program) -> Placer | None:
    """The placer of a run, where its config has one and its model has experts."""
    cfg = program.cfg.placement
    on = cfg.every > 0 or bool(cfg.file)
    return Placer(program) if on and program.parts.moe_layers() else None
