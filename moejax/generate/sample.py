"""Choosing the next token: greedy, or by temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import ConfigError
from moejax.partitioning import batch_local, constrain
from moejax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: only the k most likely tokens stay; 0 keeps all.
      top_p: of those, only the fewest most likely ones that hold at least this probability.
      seed: a row's tokens depend on it, on the row's number and on the place in the row, and on
        nothing else: not on the other rows, the batch or the mesh.
    Raises:
      ConfigError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = None
        if not 0 <= self.temperature < float("inf"):
            wrong = f"temperature={self.temperature} is not allowed: 0 (greedy) or more."
        elif self.top_k < 0:
            wrong = f"top_k={self.top_k} is not allowed: 0 (all tokens) or more."
        elif not 0 < self.top_p <= 1:
            wrong = f"top_p={self.top_p} is not allowed: more than 0, at most 1 (all tokens)."
        elif not 0 <= self.seed < 2**31:
            wrong = f"seed={self.seed} is not allowed: 0 or more, less than 2**31."
        if wrong:
            raise ConfigError(wrong)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


class Draw(NamedTuple):
    """What drawing reads beside the logits, as arrays: changing them compiles nothing.

    Attributes:
      rows_B: int32, number of each row among all prompts.
      temperature, top_p, seed: scalars of :class:`Sampling`.
    """

    rows_B: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    seed: jax.Array


def make_draw(sampling: Sampling, rows_B: Int[np.ndarray, " B"]) -> Draw:
    """The arrays of a setting, for rows of these numbers."""
    numbers = (jnp.float32(sampling.temperature), jnp.float32(sampling.top_p))
    return Draw(jnp.asarray(rows_B, jnp.int32), *numbers, jnp.int32(sampling.seed))


def choose(
    logits_BV: Float[Array, "B V"],
    draw: Draw,
    place: Int[Array, ""],
    *,
    greedy: bool,
    top_k: int,
) -> Int[Array, " B"]:
    """The next token of every row, int32, the same on every device.

    Args:
      logits_BV: float32.
      draw: rows and numbers of the sampling.
      place: how many tokens the rows have been given so far.
      greedy, top_k: the sampling's settings that decide the program.
    """
    run = batch_local(functools.partial(_choose, greedy=greedy, top_k=top_k), (0, 0))
    return constrain(run(logits_BV, *draw, place), (None,))


def _choose(logits_BV, rows_B, temperature, top_p, seed, place, *, greedy, top_k):
    if greedy:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    size = logits_BV.shape[-1]
    values_BK, ids_BK = jax.lax.top_k(logits_BV, min(top_k or size, size))
    values_BK = values_BK / temperature
    p_BK = jax.nn.softmax(values_BK)
    before_BK = jnp.cumsum(p_BK, -1) - p_BK  # probability of the more likely ones; 0 for the first
    values_BK = jnp.where(before_BK < top_p, values_BK, -jnp.inf)

    def draw(row, values_K):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), place)
        return jax.random.categorical(key, values_K)

    picks_B = jax.vmap(draw)(rows_B, values_BK)
    return jnp.take_along_axis(ids_BK, picks_B[:, None], -1)[:, 0].astype(jnp.int32)
