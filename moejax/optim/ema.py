"""Moving average of the parameters, kept in the optimizer state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from moejax.typing import Array, PyTree


class EmaState(NamedTuple):
    """Averaged parameters and the number of updates they saw."""

    step: Array
    average: PyTree


def parameter_ema(decay: float) -> optax.GradientTransformation:
    """Averages the parameters as they will be after this update; stands last in a chain.

    `A <- d A + (1 - d) W`, `d = min(decay, (1 + t)/(10 + t))` at update t = 1, 2, ..., A_0 = W_0.
    The ramp of d lets the start be forgotten in runs shorter than 1/(1 - decay) steps.
    """

    def init(params: PyTree) -> EmaState:
        # A copy: the step donates parameters and state, and one buffer cannot be donated twice.
        return EmaState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates: PyTree, state: EmaState, params: PyTree) -> tuple[PyTree, EmaState]:
        step = optax.safe_increment(state.step)
        keep = jnp.minimum(decay, (1.0 + step) / (10.0 + step)).astype(jnp.float32)
        average = jax.tree.map(
            lambda a, w, u: keep * a + (1.0 - keep) * (w + u), state.average, params, updates
        )
        return updates, EmaState(step, average)

    return optax.GradientTransformation(init, update)


def ema_params(opt_state: PyTree) -> PyTree:
    """The averaged parameters inside an optimizer state, for evaluation.

    Raises:
      ValueError: the state holds no average.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, EmaState))
    found = [node for node in nodes if isinstance(node, EmaState)]
    if not found:
        raise ValueError(
            "this optimizer state has no average of the parameters. Set optim.ema_decay above 0."
        )
    return found[0].average
