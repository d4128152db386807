"""Where a loss stopped being a number: the first bad tensor by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import ConfigError
from moejax.models.decoder import by_layer, layer_kinds
from moejax.models.parts import flat_infos, model_parts
from moejax.train.state import Program, TrainState
from moejax.train.step import gradients
from moejax.train.trainable import split


class NonFiniteError(ConfigError):
    """Training stopped because loss or gradient was not finite."""


def first_bad_tensor(program: Program, state: TrainState, batch: dict[str, jax.Array]) -> str:
    """Name of the first tensor of a step that is not finite, in the order they are computed.

    Parameters; outputs of the layers, for which the step is run again with layers that look at
    them; the loss; gradients, in the model's order.
    """
    names = [info.name for info in flat_infos(program.parts.infos)]
    watching = _watching(program)

    def bad(tree: Any) -> jax.Array:
        return jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])

    def again(state: TrainState, batch: dict[str, jax.Array]) -> dict[str, Any]:
        grads, measured = gradients(watching, state, batch)
        layers = {
            name: by_layer(measured["aux"], watching.parts.segments, name)
            for name in ("bad_attention", "bad_output")
        }
        return layers | {"loss": measured["loss"], "grads": bad(grads)}

    with jax.set_mesh(program.mesh):
        # No step changes frozen maps, which may be more than the devices hold.
        seen = jax.tree.map(
            lambda leaf, hosted: jnp.zeros(()) if hosted else leaf,
            state.params, program.hosted.params,
        )  # fmt: skip
        flags = jax.device_get(jax.jit(bad)(seen))
        if flags.any():
            return f"parameter {names[int(flags.argmax())]}"
        found = jax.device_get(jax.jit(again)(state, batch))
    if found["bad_output"].any():
        return _layer_name(program, found["bad_attention"], found["bad_output"])
    if not np.isfinite(found["loss"]):
        return "the loss itself, after layers that are finite"
    if found["grads"].any():
        trained = split(program.parts.infos, program.trains)[0]
        names = [info.name for info in flat_infos(trained)]
        return f"gradient of {names[int(found['grads'].argmax())]}"
    return "the global norm of the gradients, which are finite each"


def _watching(program: Program) -> Program:
    """The same program over layers that look at their outputs."""
    parts = program.parts
    return program._replace(parts=model_parts(parts.cfg, **{**parts.options, "watch": True}))


def _layer_name(program: Program, bad_attention_L: np.ndarray, bad_output_L: np.ndarray) -> str:
    layer = int(bad_output_L.astype(bool).argmax())
    kind = layer_kinds(program.parts.cfg)[layer]
    if bad_attention_L[layer]:
        return f"output of the attention of layer {layer} ({kind.attention})"
    return f"output of the feed-forward part of layer {layer} ({kind.ffn})"
