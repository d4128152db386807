"""grouped_matmul and its gradient out of three kernels: what GPUs and TPUs have in common.

h = rows W + low B,   low = s rows A            out = act(h)
dh = act'(h) dout     (h once more: nothing is kept beyond the arguments)
z = s dh B^T          drows = dh W^T + z A^T
dW = rows^T dh        dA = rows^T z             dB = low^T dh
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Engine(NamedTuple):
    """The kernels of a platform.

    Attributes:
      plan: (group_sizes, num_rows) -> what the kernels need to know of the groups.
      rows: (plan, x, weight, *, name, across, activation, betas, low, d_out, scale) -> scale times
        x W, or x W^T where `across`, plus the product of the pair `low`; through the activation,
        or, with `d_out`, the gradient of what the activation reads. Rows of no group give 0.
      weights: (plan, x, d, *, name, dtype, shared) -> sum over a group's rows of x^T d; of all
        groups' rows where `shared`.
    """

    plan: Callable[..., Any]
    rows: Callable[..., jax.Array]
    weights: Callable[..., jax.Array]


class Mode(NamedTuple):
    """What is static."""

    engine: Engine
    activation: str | None
    betas: tuple
    lora_scale: float


def check(rows_RK: jax.Array, weights: dict[str, jax.Array]) -> None:
    """Refuses what no kernel here takes.

    Raises:
      NotImplementedError: a dtype other than float32 and bfloat16, or more than one.
    """
    if rows_RK.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"rows are {rows_RK.dtype}, not float32 or bfloat16")
    same = [name for name in ("base", "a", "b") if name in weights]
    if "scales" in weights:
        same.remove("base")
    for name in same:
        if weights[name].dtype != rows_RK.dtype:
            raise NotImplementedError(
                f"rows are {rows_RK.dtype}, weights ({name}) {weights[name].dtype}"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(mode, rows_RK, weights, group_sizes_E):
    """As `chunked.grouped_matmul`, with the kernels of `mode.engine`."""
    plan = mode.engine.plan(group_sizes_E, rows_RK.shape[0])
    return mode.engine.rows(
        plan, rows_RK, _base(weights), name="grouped_rows",
        activation=mode.activation, betas=mode.betas, low=_low(mode, plan, rows_RK, weights),
    )  # fmt: skip


def _base(weights):
    return {name: weights[name] for name in ("base", "scales") if name in weights}


def _low(mode, plan, rows_RK, weights):
    """s (x A), rounded as the next product takes it, and B."""
    if "a" not in weights:
        return None
    low_RQ = mode.engine.rows(
        plan, rows_RK, {"base": weights["a"]}, name="grouped_low", scale=mode.lora_scale
    )
    return low_RQ, weights["b"]


def _fwd(mode, rows, weights, group_sizes):
    args = jax.tree.map(lambda p: p.value, (rows, weights, group_sizes))
    # Keys without arrays: they are static, and reach the backward in the residuals' structure.
    floats = (n for n, w in args[1].items() if jnp.issubdtype(w.dtype, jnp.inexact))
    wanted: dict[str, dict] = {name: {} for name in floats if weights[name].perturbed}
    if rows.perturbed:
        wanted["rows"] = {}
    return grouped_matmul(mode, *args), (args, wanted)


def _bwd(mode, residuals, d_out_RF):
    (rows_RK, weights, group_sizes_E), wanted = residuals
    if isinstance(d_out_RF, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    engine = mode.engine
    plan = engine.plan(group_sizes_E, rows_RK.shape[0])
    low = _low(mode, plan, rows_RK, weights)
    dh_RF = d_out_RF
    if mode.activation is not None:
        dh_RF = engine.rows(
            plan, rows_RK, _base(weights), name="grouped_dh",
            activation=mode.activation, betas=mode.betas, low=low, d_out=d_out_RF,
        )  # fmt: skip
    grads = {name: None for name in weights}
    z = None
    if "a" in weights and ("a" in wanted or "rows" in wanted):
        z_RQ = engine.rows(
            plan, dh_RF, {"base": weights["b"]}, name="grouped_dlow",
            across=True, scale=mode.lora_scale,
        )  # fmt: skip
        z = z_RQ, weights["a"]
    d_rows_RK = None
    if "rows" in wanted:
        d_rows_RK = engine.rows(
            plan, dh_RF, _base(weights), name="grouped_drows", across=True, low=z
        )
    factors = {"base": (rows_RK, dh_RF), "a": (rows_RK, z and z[0]), "b": (low and low[0], dh_RF)}
    for name, (x, d) in factors.items():
        if name in wanted:
            grads[name] = engine.weights(
                plan, x, d, name=f"grouped_d{name}", dtype=weights[name].dtype,
                shared=weights[name].ndim == 2,
            )  # fmt: skip
    return d_rows_RK, grads, None


grouped_matmul.defvjp(_fwd, _bwd, symbolic_zeros=True)
