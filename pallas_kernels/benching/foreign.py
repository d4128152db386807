"""Other JAX libraries, each in a function of its own; ImportError where one is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_JAX_LIBRARIES = ("tokamax", "jla")
_TORCH_LIBRARIES = ("torch", "triton", "fla", "liger_kernel")


def tokamax_ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """tokamax's grouped product, by whatever it chooses for this device."""
    import tokamax

    return tokamax.ragged_dot(rows, weights, sizes)


def jla_ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """The grouped product of jax-linear-attention, Mosaic GPU."""
    from jla.ops.mosaic_gpu import ragged_dot

    return ragged_dot.ragged_dot(rows, weights, sizes, full_groups=True)


def jla_kda(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> jax.Array:
    """KDA of jax-linear-attention, Mosaic GPU, from log decays; it norms q and k itself."""
    from jla.ops import linear_attention

    options = {"g": log_decay, "beta": beta, "use_qk_l2norm": True}
    return linear_attention("kda", q, k, v, impl="mosaic_gpu", **options)[0]


def jla_xent(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Summed cross entropy of jax-linear-attention, Mosaic GPU."""
    from jla.ops.cross_entropy import linear_cross_entropy

    return jax.tree.leaves(linear_cross_entropy(x, weight, labels, impl="mosaic_gpu"))[0]


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> jax.Array:
    """Dense attention [B, T, N, h] in float32 by cuDNN, which wants values as wide as keys."""
    width = v.shape[-1]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - width)))
    try:
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, implementation="cudnn"
        )
    except RuntimeError as error:
        raise ImportError(f"cuDNN: {error}") from error
    return out[..., :width].astype(jnp.float32)


def installed() -> dict[str, bool]:
    """Which of the libraries can be imported."""
    names = (*_JAX_LIBRARIES, *_TORCH_LIBRARIES)
    return {name: importlib.util.find_spec(name) is not None for name in names}


def torch_results(
    names: Sequence[str], dims: Mapping[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Times of torch's side, measured in a process of its own, one dict a line that it printed.

    Raises:
      ImportError: torch is not installed.
      TimeoutError: it took longer than `seconds`.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError("No module named 'torch'")
    command = [sys.executable, "-m", "pallas_kernels.benching.torch_side", ",".join(names)]
    asked = [*command, json.dumps(dict(dims))]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=max(seconds, 1), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"torch took more than {seconds:.0f} s") from error
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError((done.stderr.strip().splitlines() or ["torch printed nothing"])[-1])
    return lines
