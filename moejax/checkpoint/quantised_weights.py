"""Plain weights read as the codes and scales that a run keeps of its frozen base."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from moejax.checkpoint.weights import Leaves, Weights
from moejax.layers.quantised import encode, format_of, scale_name

IN_AXIS = 2  # of a stacked map [repeats, count, in, *out]


def quantising(weights: Weights, wanted: Leaves) -> Weights:
    """`weights`, with the leaves that are wanted as codes quantised as they are read."""
    coded = [name for name, leaf in wanted.items() if format_of(leaf.dtype)]
    return QuantisedWeights(weights, coded) if coded else weights


class QuantisedWeights:
    """Weights of which some maps are codes, each with a leaf of scales beside it."""

    def __init__(self, weights: Weights, coded: list[str]):
        self._plain, self.model = weights, weights.model
        self.shapes = dict(weights.shapes)
        for name in coded:
            if name in self.shapes:
                shape = self.shapes[name]
                self.shapes[scale_name(name)] = (*shape[:IN_AXIS], *shape[IN_AXIS + 1 :])

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """These leaves, codes and their scales together.

        One map after the other, so that of one alone there are plain values.
        """
        coded = [name for name, leaf in leaves.items() if format_of(leaf.dtype)]
        ours = {*coded, *map(scale_name, coded)}
        rest = {name: leaf for name, leaf in leaves.items() if name not in ours}
        read = self._plain.read(rest) if rest else {}
        for name in coded:
            read |= self._coded(leaves, name)
        return {name: read[name] for name in leaves}

    def _coded(self, leaves: Leaves, name: str) -> dict[str, jax.Array]:
        names, leaf = (name, scale_name(name)), leaves[name]
        plain = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
        value = self._plain.read({name: plain})[name]
        run = jax.jit(
            lambda value: encode(value, str(format_of(leaf.dtype)), IN_AXIS),
            out_shardings=tuple(leaves[n].sharding for n in names),
        )
        return dict(zip(names, jax.block_until_ready(run(value)), strict=True))

    def keep_for_export(self, workdir: pathlib.Path) -> None:
        """As the plain weights do."""
        self._plain.keep_for_export(workdir)


def stored_as(value: Any, dtype: str) -> jax.Array:
    """A leaf of plain weights in the type of a run's: its codes, where they are codes."""
    form = format_of(jnp.dtype(dtype))
    value = jnp.asarray(value)
    return encode(value, form, IN_AXIS)[0] if form else value.astype(dtype)
