"""Compares an implementation of an operator with its reference: outputs and every gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.dtypes import sum_dtype

Arrays = Mapping[str, Any]  # array, or None


def relative_rms(actual: Any, expected: Any, *, floor: float = 1e-30) -> float:
    """Root mean square of the difference over that of `expected` (at least `floor`).

    Integers and booleans are compared for equality: the share of entries that differ. NaN stays
    NaN, so compare with `error <= tolerance`, never with `not error > tolerance`.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.shape}")
    if actual.size == 0:
        return 0.0
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return float(np.mean(actual != expected))
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    scale = max(float(np.sqrt(np.mean(expected**2))), floor)
    return float(np.sqrt(np.mean((actual - expected) ** 2))) / scale


def output_and_vjp(
    fn: Callable[..., Any],
    inputs: Arrays,
    *,
    wrt: Sequence[str] | None = None,
    cotangents: Any = None,
    seed: int = 0,
    **options: Any,
) -> tuple[list[Array], dict[str, Array]]:
    """Outputs of `fn(**inputs, **options)` and its vector-Jacobian product, under `jax.jit`.

    Args:
      inputs: name -> array; None is passed on as it is.
      wrt: names to differentiate; every floating input if None, nothing if empty.
      cotangents: one array per floating output, in order; normal numbers from `seed` if None.
      options: static keyword arguments of `fn`.
    Returns:
      The outputs flattened to a list, and name -> gradient.
    """
    arrays = {name: jnp.asarray(a) for name, a in inputs.items() if a is not None}
    nones = {name: None for name, a in inputs.items() if a is None}
    if wrt is None:
        wrt = [name for name, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)]
    variables = {name: arrays[name] for name in wrt}
    constants = {name: a for name, a in arrays.items() if name not in variables}

    def run(variables: dict[str, Array], constants: dict[str, Array], cotangents: Any) -> Any:
        def floating_outputs(variables: dict[str, Array]) -> tuple[list[Array], list[Array]]:
            outputs = jax.tree.leaves(fn(**variables, **constants, **nones, **options))
            return [o for o in outputs if jnp.issubdtype(o.dtype, jnp.floating)], outputs

        floating, pullback, outputs = jax.vjp(floating_outputs, variables, has_aux=True)
        if cotangents is None:
            keys = jax.random.split(jax.random.key(seed), len(floating))
            # drawn in float32, so that a low-precision output gets the reference's cotangent
            cotangents = [
                jax.random.normal(key, o.shape, jnp.float32)
                for key, o in zip(keys, floating, strict=True)
            ]
        cotangents = [c.astype(o.dtype) for c, o in zip(cotangents, floating, strict=True)]
        return outputs, pullback(cotangents)[0] if variables else {}

    if cotangents is not None:
        cotangents = [jnp.asarray(c) for c in cotangents]
    # the same program, compiled in a third of the time on CPU: a case runs once
    compiler = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(run, compiler_options=compiler)(variables, constants, cotangents)


def compare(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Arrays,
    *,
    wrt: Sequence[str] | None = None,
    cotangents: Any = None,
    seed: int = 0,
    upcast: bool = True,
    floor: float = 1e-30,
    **options: Any,
) -> dict[str, float]:
    """Relative RMS error of each output ("out0", "out1", ...) and gradient ("d_" + input's name).

    `upcast` hands the reference every low-precision input in float32 (same values).
    """
    exact = dict(inputs)
    if upcast:
        exact = {name: _at_least_float32(a) for name, a in inputs.items()}
    draws = {"wrt": wrt, "cotangents": cotangents, "seed": seed}
    outputs, grads = output_and_vjp(fn, inputs, **draws, **options)
    expected, expected_grads = output_and_vjp(reference, exact, **draws, **options)
    errors = {
        f"out{i}": relative_rms(a, b, floor=floor)
        for i, (a, b) in enumerate(zip(outputs, expected, strict=True))
    }
    for name, grad in grads.items():
        errors[f"d_{name}"] = relative_rms(grad, expected_grads[name], floor=floor)
    return errors


def assert_close(errors: Mapping[str, float], tolerance: float | Mapping[str, float]) -> None:
    """Fails with every name whose error is above its tolerance, or not a number.

    `tolerance` is one number, or name -> number with "*" for the names it does not list.
    """
    limits = tolerance if isinstance(tolerance, Mapping) else {"*": tolerance}
    limit_of = {name: limits[name] if name in limits else limits["*"] for name in errors}
    bad = [
        f"{name}: error {error:.3g} > {limit_of[name]:.3g}"
        for name, error in errors.items()
        if not error <= limit_of[name]
    ]
    assert not bad, "; ".join(bad)


def _at_least_float32(a: Any) -> Any:
    if a is None or not jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating):
        return a
    return jnp.asarray(a).astype(sum_dtype(jnp.asarray(a)))
