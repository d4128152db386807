"""What a parameter says about itself beside its array: name, logical axes, stacking, matrix."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Facts about one parameter that sharding, optimizer and export read.

    The class is no pytree node, so a tree of ParamInfo has the structure of its tree of arrays.

    Attributes:
      name: dotted path, e.g. `layers.kda.q_proj.kernel`.
      axes: logical axis of each dim of one layer's parameter; None = never sharded.
      stack: leading dims that stack layers for the scan (0, 1 or 2); they come before `axes`.
      matrix: the two negative dims (in, out) that form one matrix for Muon. Every other dim is a
        batch of matrices: stacked layers, heads, experts, gate and up. None = AdamW.
      head_axis: negative dim of the heads when `matrix` is one head's block. It stands right
        before the block's own head-width dim, so that both merge into the whole matrix.
    """

    name: str
    axes: tuple[str | None, ...]
    stack: int = 0
    matrix: tuple[int, int] | None = None
    head_axis: int | None = None

    def __post_init__(self) -> None:
        if self.stack not in (0, 1, 2):
            raise ValueError(
                f"{self.name}: stack={self.stack}; 0, 1 or 2 leading dims stack layers."
            )
        if self.matrix is None:
            if self.head_axis is not None:
                raise ValueError(f"{self.name}: head_axis={self.head_axis} needs matrix=(in, out).")
            return
        dims = self.matrix if self.head_axis is None else (*self.matrix, self.head_axis)
        if any(not -len(self.axes) <= dim < 0 for dim in dims) or len(set(dims)) != len(dims):
            raise ValueError(
                f"{self.name}: matrix={self.matrix}, head_axis={self.head_axis} must be different "
                f"dims from -{len(self.axes)} to -1 of {self.axes}."
            )
        if self.head_axis is not None and self.head_axis + 1 not in self.matrix:
            raise ValueError(
                f"{self.name}: head_axis={self.head_axis} must stand right before a dim of "
                f"matrix={self.matrix}, the width of a head."
            )

    @property
    def num_dims(self) -> int:
        """Dims of one layer's parameter; below 2 it is a vector or scalar."""
        return len(self.axes)
