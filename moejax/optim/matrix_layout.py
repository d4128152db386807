"""How one parameter is a stack of matrices, [S, R, r, c], and where its parts are stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from moejax.partitioning import ParamInfo, active_mesh, stored_spec
from moejax.typing import Array

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """A leaf as stack [S, R, r, c]: S the sharded batch dim, R all other batch dims, r <= c.

    Attributes:
      shape: the leaf's own.
      order: its dims in the order S, R, r, c.
      stack: sizes of S, R, r, c.
      stored: mesh axes of S, R, r, c where the leaf is stored.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    stack: tuple[int, ...]
    stored: tuple[MeshAxes | None, ...]

    @property
    def rest(self) -> int:
        """R, this leaf's share of a joined stack."""
        return self.stack[1]

    @property
    def rows(self) -> int:
        """r, the smaller side."""
        return self.stack[2]

    @property
    def cols(self) -> int:
        """c, the larger side."""
        return self.stack[3]

    @property
    def elements(self) -> int:
        """Numbers in the leaf."""
        return math.prod(self.shape)

    @property
    def key(self) -> tuple:
        """Equal for leaves that can be joined along R without moving anything."""
        return self.stack[0], self.rows, self.cols, self.stored

    def to_stack(self, x: Array) -> Array:
        """[S, R, r, c] from the leaf."""
        return x.transpose(self.order).reshape(self.stack)

    def from_stack(self, x_SRrc: Array) -> Array:
        """The leaf from [S, R, r, c]."""
        permuted = x_SRrc.reshape([self.shape[dim] for dim in self.order])
        return permuted.transpose([self.order.index(dim) for dim in range(len(self.order))])

    def batch_axes(self, mesh_shape: Mapping[str, int]) -> tuple[MeshAxes, MeshAxes]:
        """Mesh axes to spread S*R over: those that store the leaf, then these and all others.

        The axes of S come first, so that no part of S leaves its devices.
        """
        stored = [axis for dim in (0, 2, 3) for axis in self.stored[dim] or ()]
        every = [axis for axis in mesh_shape if mesh_shape[axis] > 1 and axis not in stored]
        return tuple(stored), (*stored, *every)


def layout_of(shape: tuple[int, ...], info: ParamInfo, per_head: bool) -> MatrixLayout:
    """The layout of a leaf of `shape`, stored as the STORED table says on the active mesh.

    Args:
      shape: stacked dims, then one dim for each of `info.axes`.
      info: says which dims form the matrix.
      per_head: one matrix per head, else heads merge into the side they belong to.
    Raises:
      ValueError: `info` has no matrix, or other dims than the leaf.
    """
    if info.matrix is None:
        raise ValueError(
            f"{info.name} has no matrix=(in, out), which Muon needs; give it to AdamW."
        )
    num_dims = len(shape)
    if num_dims != info.stack + len(info.axes):
        raise ValueError(
            f"{info.name} has shape {shape}, but stack={info.stack} and axes={info.axes} "
            f"describe {info.stack + len(info.axes)} dims."
        )
    entries = _stored_entries(info, shape)

    def size_then_whole(side: list[int]) -> tuple[int, bool]:
        return math.prod(shape[dim] for dim in side), not any(entries[dim] for dim in side)

    # Of two equal sides the sharded one counts as rows, so that leaves sharded on their inputs
    # and leaves sharded on their outputs go together.
    sides = [_side(num_dims + dim, info, per_head, num_dims) for dim in info.matrix]
    rows, cols = sorted(sides, key=size_then_whole)
    batch = [dim for dim in range(num_dims) if dim not in (*rows, *cols)]
    lead = [dim for dim in batch if entries[dim]][:1]
    rest = [dim for dim in batch if dim not in lead]
    parts = (lead, rest, rows, cols)
    return MatrixLayout(
        shape=tuple(shape),
        order=tuple(dim for dims in parts for dim in dims),
        stack=tuple(math.prod(shape[dim] for dim in dims) for dims in parts),
        stored=tuple(_merged([entries[dim] for dim in dims]) for dims in parts),
    )


def _side(dim: int, info: ParamInfo, per_head: bool, num_dims: int) -> list[int]:
    """Dims of one side of the matrix, with the heads before their width if they merge."""
    heads = None if info.head_axis is None else num_dims + info.head_axis
    return [heads, dim] if heads == dim - 1 and not per_head else [dim]


def _stored_entries(info: ParamInfo, shape: tuple[int, ...]) -> list[MeshAxes | None]:
    """Mesh axes larger than 1 over which each dim is stored; None where it is whole."""
    mesh = active_mesh()
    if mesh is None:
        return [None] * len(shape)
    sizes = dict(mesh.shape)
    spec = stored_spec(info, shape, sizes)
    tuples = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [tuple(axis for axis in entry if sizes[axis] > 1) or None for entry in tuples]


def _merged(entries: list[MeshAxes | None]) -> MeshAxes | None:
    """Mesh axes of dims merged into one: known where only the first of them is sharded."""
    return entries[0] if entries and not any(entries[1:]) else None
