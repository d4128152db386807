"""The one door to Pallas' Triton backend: calls, loads, products, atomic sums.

Every GPU kernel of this package goes through here, so that a change of that backend is a change of
this file. On a CPU the same bodies run in Pallas' interpreter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.choose import target_platform


def interpreted() -> bool:
    """Whether kernels run in the interpreter: the program is for no GPU."""
    return target_platform() != "gpu"


def call(
    body: Callable[..., None], *, name: str, grid: tuple[int, ...], in_specs: Sequence[Any],
    out_specs: Any, out_shape: Any, warps: int = 4, stages: int = 2,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """`pl.pallas_call` on the Triton backend, or in the interpreter where `interpreted`.

    Args:
      body: takes references to inputs, then to outputs; programs run in no order.
      name: of the kernel, as profiles and PTX show it.
      grid: programs along each axis; a GPU starts the first axis first, the interpreter the last.
      in_specs, out_specs: `pl.BlockSpec`s; sizes of blocks are powers of two.
      out_shape: `jax.ShapeDtypeStruct` of every output.
      warps: of a program, 32 threads each.
      stages: depth of the software pipeline of loops.
      aliases: input -> output that shares its memory.
    """
    options: dict[str, Any] = {"interpret": True}
    if not interpreted():
        params = pltriton.CompilerParams(num_warps=warps, num_stages=stages)
        options = {"compiler_params": params}
    run = pl.pallas_call(
        body, grid=grid, in_specs=list(in_specs), out_specs=out_specs, out_shape=out_shape,
        input_output_aliases=dict(aliases or {}), name=name, **options,
    )  # fmt: skip

    def called(*args: Any) -> Any:
        with warnings.catch_warnings():
            # from jax 0.11 on it says at every call that this backend is on its way out
            warnings.filterwarnings("ignore", message=".*[Tt]riton.*", category=DeprecationWarning)
            return run(*args)

    return called


def load(ref: Any, mask: jax.Array | None = None) -> jax.Array:
    """Values of a reference or of a part of it, `ref.at[...]`; 0 where `mask` is False."""
    if mask is None:
        return pltriton.load(ref)
    return pltriton.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref: Any, value: jax.Array, mask: jax.Array | None = None) -> None:
    """Writes to a reference or a part of it, in its dtype; only where `mask` is True."""
    pltriton.store(ref, value.astype(ref.dtype), mask=mask)


def dot(
    a: jax.Array, b: jax.Array, *, trans_a: bool = False, trans_b: bool = False,
    exact: bool = False, nearly_exact: bool = False,
) -> jax.Array:  # fmt: skip
    """Product of two tiles, summed in float32.

    Args:
      trans_a, trans_b: the tile is to be read across.
      exact: products of float32 are those of float32; otherwise a GPU may round their factors to
        TF32, 10 bits. Half precision is always exact.
      nearly_exact: factors of float32 keep 16 bits, at three products of bfloat16.
    """
    contract = ((0 if trans_a else 1,), (1 if trans_b else 0,))
    precision: Any = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
        if not exact and not interpreted():
            presets = lax.DotAlgorithmPreset
            precision = presets.BF16_BF16_F32_X3 if nearly_exact else presets.TF32_TF32_F32
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def load_rows(
    ref: Any, rows: jax.Array, mask: jax.Array | None = None,
    columns: tuple[Any, int] | None = None,
) -> jax.Array:  # fmt: skip
    """`ref[rows, :]` of a reference of two dims; zeros where `mask`, of [i] or [i, j], is False.

    Where masked, `rows` and columns may be anything. `columns` is the first one and how many.
    """
    start, width = columns or (0, ref.shape[1])
    if interpreted() and mask is not None:  # which knows no mask beside an index array
        where = _of_all(mask, rows, width)
        safe = jnp.where(where, rows[:, None], 0), jnp.where(where, _columns(start, width), 0)
        return jnp.where(where, ref[safe], jnp.zeros((), ref.dtype))
    if mask is None:
        return ref[rows, pl.ds(start, width)]  # which both know
    at = ref.at[rows, pl.ds(start, width)]
    where = _of_all(mask, rows, width)
    return pltriton.load(at, mask=where, other=jnp.zeros((), ref.dtype))


def store_rows(
    ref: Any, rows: jax.Array, values: jax.Array, mask: jax.Array,
    columns: tuple[Any, int] | None = None,
) -> None:  # fmt: skip
    """`ref[rows[i], :] = values[i, :]` where `mask`, of [i] or [i, j], is True.

    No row twice; `columns` as in `load_rows`.
    """
    start, width = columns or (0, ref.shape[1])
    where, values = _of_all(mask, rows, width), values.astype(ref.dtype)
    if not interpreted():
        pltriton.store(ref.at[rows, pl.ds(start, width)], values, mask=where)
        return
    # what lies outside is dropped, which a mask beside index arrays is not: it would write back
    outside = jnp.where(where, rows[:, None], ref.shape[0])
    ref[outside, jnp.broadcast_to(_columns(start, width), where.shape)] = values


def store_at(ref: Any, places: jax.Array, values: jax.Array, mask: jax.Array) -> None:
    """`ref[places[i]] = values[i]` of a reference of one dim where `mask` [i]; no place twice."""
    if not interpreted():
        pltriton.store(ref.at[places], values.astype(ref.dtype), mask=mask)
        return
    # as in `store_rows`: what lies outside is dropped
    ref[jnp.where(mask, places, ref.shape[0])] = values.astype(ref.dtype)


def _of_all(mask: jax.Array, rows: jax.Array, width: int) -> jax.Array:
    return jnp.broadcast_to(mask if mask.ndim == 2 else mask[:, None], (rows.shape[0], width))


def _columns(start: Any, width: int) -> jax.Array:
    return (start + jnp.arange(width, dtype=jnp.int32))[None, :]


def add_rows(
    ref: Any, rows: jax.Array, values: jax.Array, mask: jax.Array,
    columns: tuple[Any, int] | None = None,
) -> None:  # fmt: skip
    """`ref[rows[i], :] += values[i, :]` where `mask` [i] is True, atomic among programs.

    The order of the sums, so their last bits, changes from run to run on a GPU. `columns` as in
    `load_rows`.
    """
    part = pl.ds(*(columns or (0, ref.shape[1])))
    if not interpreted():
        where = jnp.broadcast_to(mask[:, None], values.shape)
        pltriton.atomic_add(ref, (rows, part), values.astype(ref.dtype), mask=where)
        return
    _row_by_row(ref, part, rows, values, mask, lambda old, new: old + new)


def add(ref: Any, at: tuple[Any, ...], values: jax.Array, mask: jax.Array) -> None:
    """`ref[at] += values` where `mask` is True, for slices `at`; atomic among programs."""
    where = jnp.broadcast_to(mask, values.shape)
    if not interpreted():
        pltriton.atomic_add(ref, at, values.astype(ref.dtype), mask=where)
        return
    # whose atomic sums know no mask; its programs run one after the other
    store(ref.at[at], load(ref.at[at], where) + values.astype(ref.dtype), where)


def _row_by_row(
    ref: Any, part: Any, rows: jax.Array, values: jax.Array, mask: jax.Array, combine: Callable
) -> None:
    """What the interpreter cannot do at an index array; its programs run one after the other."""

    def one(i: Any, _: None) -> None:
        at = (pl.ds(jnp.where(mask[i], rows[i], 0), 1), part)
        old = ref[at]
        new = lax.dynamic_index_in_dim(values, i, keepdims=True).astype(ref.dtype)
        ref[at] = jnp.where(mask[i], combine(old, new), old)

    lax.fori_loop(0, values.shape[0], one, None)
