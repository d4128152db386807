"""Errors of an attention kernel against the reference, by the name of the output or gradient."""

import jax
import jax.numpy as jnp

from pallas_kernels.testing import output_and_vjp, relative_rms

# The outputs' and the gradients'.
TOLERANCE = {"float32": 1e-5, "bfloat16": {"out": 5e-3, "lse": 5e-3, "*": 1e-2}}


def errors(kernel, reference, inputs: dict, clean: dict) -> dict[str, float]:
    """Relative errors of `kernel(**inputs)` against `reference(**clean)`, which is in float32.

    `inputs` differ from `clean` in nothing that may count, such as NaN in padding.
    """
    wide = {name: x.astype(jnp.float32) if _floating(x) else x for name, x in clean.items()}
    actual, actual_grads = output_and_vjp(kernel, inputs)
    expected, expected_grads = output_and_vjp(reference, wide)
    pairs = dict(zip(("out", "lse"), zip(actual, expected, strict=True), strict=True))
    # the lse of a query that sees no key: 1e30, beside which no other is anything
    pairs["lse"] = tuple(jnp.where(x > 1e29, -1, x) for x in pairs["lse"])
    pairs |= {f"d_{name}": (x, expected_grads[name]) for name, x in actual_grads.items()}
    return {name: relative_rms(*pair, floor=1e-3) for name, pair in pairs.items()}


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def poisoned_padding(inputs: dict) -> dict:
    """q, k, v with NaN where the document is 0."""
    if "segment_ids" not in inputs:
        return inputs
    padding = (inputs["segment_ids"] == 0)[..., None, None]
    poison = {name: jnp.where(padding, jnp.nan, inputs[name]) for name in ("q", "k", "v")}
    return inputs | poison
