"""The one door to Pallas' TPU backend: calls and products.

On anything but a TPU the same bodies run in Pallas' interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.choose import target_platform


def interpreted() -> bool:
    """Whether kernels run in the interpreter: the program is for no TPU."""
    return target_platform() != "tpu"


def call(
    body: Callable[..., None], *, name: str, grid: tuple[Any, ...], in_specs: Sequence[Any],
    out_specs: Any, out_shape: Any, parallel: int = 0, num_prefetch: int = 0,
    scratch: Sequence[Any] = (), vmem_bytes: int | None = None,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """`pl.pallas_call` on the Mosaic backend, or in the interpreter where `interpreted`.

    Args:
      body: takes prefetched integers, references to inputs, outputs and scratch.
      name: of the kernel.
      grid: steps along each axis; they run in order, the last axis the fastest.
      in_specs, out_specs: `pl.BlockSpec`s; index maps also get the prefetched arrays.
      out_shape: `jax.ShapeDtypeStruct` of every output.
      parallel: how many leading axes of the grid carry nothing from step to step, so that cores
        may share them.
      num_prefetch: leading arguments that are int32 tables in scalar memory, for index maps.
      scratch: memory that lives through the grid, `pltpu.VMEM(shape, dtype)`.
      vmem_bytes: limit of on-chip memory where the compiler's own (16 MiB) is too low.
      aliases: argument (prefetched ones count) -> output that shares its memory.
    """
    options: dict[str, Any] = {"interpret": True}
    if not interpreted():
        kinds: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
        params = pltpu.CompilerParams(dimension_semantics=kinds, vmem_limit_bytes=vmem_bytes)
        options = {"compiler_params": params}
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=num_prefetch, grid=grid, in_specs=list(in_specs), out_specs=out_specs,
        scratch_shapes=list(scratch),
    )  # fmt: skip
    return pl.pallas_call(
        body, grid_spec=spec, out_shape=out_shape, name=name,
        input_output_aliases=dict(aliases or {}), **options,
    )  # fmt: skip


def dot(
    a: jax.Array, b: jax.Array, *, trans_a: bool = False, trans_b: bool = False,
    exact: bool = False,
) -> jax.Array:  # fmt: skip
    """Product of two tiles, summed in float32.

    Args:
      trans_a, trans_b: the tile is to be read across.
      exact: products of float32 are those of float32; otherwise a TPU rounds their factors to
        bfloat16.
    """
    contract = ((0 if trans_a else 1,), (1 if trans_b else 0,))
    precision = None
    if a.dtype == jnp.float32 and (exact or interpreted()):
        precision = lax.Precision.HIGHEST
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
