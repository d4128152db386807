"""Where a loss stopped being a number: the first bad tensor by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moejax.config import ConfigError
from moejax.models.parts import flat_infos
from moejax.train.state import Program, TrainState
from moejax.train.step import gradients


class NonFiniteError(ConfigError):
    """Training stopped because loss or gradient was not finite."""


def first_bad_tensor(program: Program, state: TrainState, batch: dict[str, jax.Array]) -> str:
    """Name of the first parameter that is not finite, else of the first such gradient.

    First in the model's order.
    """
    names = [info.name for info in flat_infos(program.parts.infos)]

    def bad(tree: Any) -> jax.Array:
        return jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])

    with jax.set_mesh(program.mesh):
        flags = jax.device_get(jax.jit(bad)(state.params))
        if flags.any():
            return f"parameter {names[int(flags.argmax())]}"
        flags = jax.device_get(jax.jit(lambda s, b: bad(gradients(program, s, b)[0]))(state, batch))
    return (
        f"gradient of {names[int(flags.argmax())]}"
        if flags.any()
        else "no parameter or gradient, the loss itself"
    )
