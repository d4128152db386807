"""Parameters that know their logical axes, and how a layer asks for one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from moejax.partitioning import ParamInfo, gather

PARAM_DTYPE = jnp.float32  # float32 master copies; layers cast at use

# Leaves below a layer that are float32 wherever they are: in the tree, in the compute of every
# dtype, in checkpoints, and in what is exported. Rounded to bfloat16, a decay of 0.999 a step is
# another memory length, and a balancing step of 1e-3 is lost in a bias of 1.
KEPT_FLOAT32 = (
    "attn.a_log", "attn.dt_bias", "attn.q_conv", "attn.k_conv", "attn.v_conv", "attn.o_norm",
    "ffn.router.bias",
)  # fmt: skip


def is_kept_float32(name: str) -> bool:
    """True for a leaf of `KEPT_FLOAT32`; `name` is its dotted path, from its layer or the top."""
    return f".{name}".endswith(tuple(f".{leaf}" for leaf in KEPT_FLOAT32))


class Balance(nnx.Variable):
    """State of the router's balancing.

    Saved with the model, touched by no gradient and no optimizer.
    """


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    std: float,
    matrix: tuple[int, int] | None = (-2, -1),
    head_axis: int | None = None,
) -> nnx.Param:
    """A normal-initialised linear map.

    Args:
      shape: [..., in, out]-like; heads and experts have dims of their own.
      axes: a logical axis (or None) a dim.
      std: standard deviation of the initial values.
      matrix: the negative (in, out) dims that form one matrix for Muon; None puts it in the AdamW
        group.
      head_axis: negative dim that counts heads, where the matrix is cut per head.
    """
    value = std * jax.random.normal(rngs.params(), shape, PARAM_DTYPE)
    return nnx.Param(value, axes=axes, matrix=matrix, head_axis=head_axis)


def vector(value: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter that is no matrix (norm weight, decay rate, query), from its initial value."""
    return nnx.Param(jnp.asarray(value, PARAM_DTYPE), axes=axes, matrix=None, head_axis=None)


def use(param: nnx.Param, dtype: Any) -> jax.Array:
    """The parameter in the compute dtype and the COMPUTE layout.

    Cast first, so that the gather moves fewer bytes.
    """
    return gather(param[...].astype(dtype), param.get_metadata()["axes"])


def wide(dtype: Any) -> Any:
    """The dtype of sums and states: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def drawing_options(mesh: Mesh) -> dict[str, Any] | None:
    """Compiler options for drawing initial weights, the same everywhere so that their bits are.

    Drawing a hundred arrays once is all compile time on a CPU: no optimisation there, three times
    faster.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else None


def param_infos(state: nnx.State) -> dict:
    """ParamInfo of every parameter, as a nested plain dict of the state's structure."""
    infos: dict = {}
    for path, variable in nnx.to_flat_state(state):
        meta = variable.get_metadata()
        node = infos
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = ParamInfo(
            name=".".join(str(p) for p in path),
            axes=meta["axes"],
            stack=len(variable.shape) - len(meta["axes"]),
            matrix=meta.get("matrix"),
            head_axis=meta.get("head_axis"),
        )
    return infos
