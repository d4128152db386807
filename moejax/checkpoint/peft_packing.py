"""The two matrices of an adapter, and how PEFT packs those of many experts into two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class LowRank(NamedTuple):
    """``scale * B A``, the change of a map in its published layout [out, in].

    Attributes:
      a: float32 [r, in]; of routed experts [E, r, in].
      b: float32 [out, r]; of routed experts [E, out, r], of gate and up first all of gate.
      scale: of the product.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def delta(self, expert: int | None = None, rows: slice = slice(None)) -> np.ndarray:
        """The change itself, float32 [out, in]: of one expert, of some rows."""
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        return np.float32(self.scale) * (b[rows] @ a)

    def scaled(self, scale: float) -> LowRank:
        """The same change under another scale: B takes up the difference."""
        if scale == self.scale:
            return self
        return LowRank(self.a, self.b * np.float32(self.scale / scale), scale)

    def padded(self, rank: int) -> LowRank:
        """The same change with zeros up to a larger rank."""
        room = [(0, 0)] * self.a.ndim
        more = (0, rank - self.rank)
        a = np.pad(self.a, [*room[:-2], more, (0, 0)])
        return LowRank(a, np.pad(self.b, [*room[:-1], more]), self.scale)

    def trimmed(self) -> LowRank:
        """The same change without the ranks at the end in which A and B are both 0."""
        axes_a = tuple(i for i in range(self.a.ndim) if i != self.a.ndim - 2)
        live = self.a.any(axis=axes_a) | self.b.any(axis=tuple(range(self.b.ndim - 1)))
        rank = int(np.flatnonzero(live)[-1]) + 1 if live.any() else 0
        return LowRank(self.a[..., :rank, :], self.b[..., :rank], self.scale)


def pack_experts(low: LowRank) -> tuple[np.ndarray, np.ndarray]:
    """A [E r, in], expert by expert, and B [out, r E], rank by rank with all experts in each.

    Source: `ParamWrapper` of PEFT 0.21.
    """
    a_Eri, b_Eor = low.a, low.b
    a = a_Eri.reshape(-1, a_Eri.shape[-1])
    return a, b_Eor.transpose(1, 2, 0).reshape(b_Eor.shape[1], -1)


def unpack_experts(a: np.ndarray, b: np.ndarray, num_experts: int, scale: float) -> LowRank:
    """The inverse of :func:`pack_experts`."""
    a_Eri = a.reshape(num_experts, -1, a.shape[-1])
    b_orE = b.reshape(b.shape[0], -1, num_experts)
    return LowRank(a_Eri, np.ascontiguousarray(b_orE.transpose(2, 0, 1)), scale)


def join_halves(gate: LowRank | None, up: LowRank | None, out: int) -> LowRank:
    """Gate and up of one expert as one map, gate's rows first.

    One A serves both where they share it; otherwise the ranks stand behind each other and B is
    block-diagonal, which is exact.

    Args:
      out: rows of either half, for one that is missing: its change is 0.
    """
    if gate is None or up is None:
        one = gate or up
        assert one is not None
        nothing = np.zeros((out, one.rank), np.float32)
        rows = (one.b, nothing) if up is None else (nothing, one.b)
        return LowRank(one.a, np.concatenate(rows), one.scale)
    up = up.scaled(gate.scale)
    if np.array_equal(gate.a, up.a):
        return LowRank(gate.a, np.concatenate([gate.b, up.b]), gate.scale)
    b = np.zeros((2 * out, gate.rank + up.rank), np.float32)
    b[:out, : gate.rank], b[out:, gate.rank :] = gate.b, up.b
    return LowRank(np.concatenate([gate.a, up.a]), b, gate.scale)


def stack_experts(experts: Sequence[LowRank | None]) -> LowRank:
    """Single experts' adapters as those of all; a missing one changes nothing."""
    known = [low for low in experts if low is not None]
    first, rank = known[0], max(low.rank for low in known)
    zero = LowRank(np.zeros_like(first.a), np.zeros_like(first.b), first.scale)
    rows = [(low or zero).scaled(first.scale).padded(rank) for low in experts]
    return LowRank(np.stack([x.a for x in rows]), np.stack([x.b for x in rows]), first.scale)
