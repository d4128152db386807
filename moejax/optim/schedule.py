"""Learning-rate schedules: warm-up, hold, decay, as one multiplier in (0, 1]."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax.numpy as jnp

from moejax.config import OptimConfig
from moejax.typing import Array

Schedule = Callable[[Array | int], Array]


def make_schedule(cfg: OptimConfig, num_steps: int) -> Schedule:
    """The multiplier of every learning rate as a function of the step.

    `m(s) = min(1, (s+1)/warmup) * (r + (1-r) f(p))`, `p = clip((s - start)/(num_steps - start))`,
    with r = min_ratio and, by name,
      cosine:   start = warmup,          f(p) = (1 + cos(pi p)) / 2
      wsd:      start = decay begins,    f(p) = 1 - p
      constant: f = 1
    The decay of wsd takes the last `decay_fraction` of the run, or begins at step `decay_start` if
    that is set: a checkpoint of a run with any `num_steps` can so be branched into its decay.

    Args:
      cfg: schedule, warmup_fraction, min_ratio, decay_fraction, decay_start are read.
      num_steps: step at which the decay reaches min_ratio; at least 1.
    Returns:
      `schedule(step)`, float32 scalar; step counts from 0 and may be traced. Never 0 at step 0.
    Raises:
      ValueError: num_steps below 1, or a decay that would start at its end or later.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} is not allowed: a schedule needs at least 1 step.")
    warmup = max(round(cfg.warmup_fraction * num_steps), 1)
    start, curve = _decay(cfg, num_steps, warmup)
    length = max(num_steps - start, 1)

    def schedule(step: Array | int) -> Array:
        s = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((s - start) / length, 0.0, 1.0)
        decayed = cfg.min_ratio + (1.0 - cfg.min_ratio) * curve(progress)
        return jnp.minimum((s + 1.0) / warmup, 1.0) * decayed

    return schedule


def _decay(cfg: OptimConfig, num_steps: int, warmup: int) -> tuple[int, Callable[[Array], Array]]:
    """Step at which the decay begins, and its shape from 1 to 0."""
    if cfg.decay_start >= 0 and cfg.schedule != "wsd":
        warnings.warn(
            f"optim.decay_start={cfg.decay_start} has no effect with optim.schedule="
            f"{cfg.schedule!r}; only 'wsd' can branch into its decay.",
            stacklevel=3,
        )
    if cfg.schedule == "cosine":
        return warmup, lambda p: 0.5 * (1.0 + jnp.cos(jnp.pi * p))
    if cfg.schedule == "constant":
        return num_steps, lambda p: jnp.ones_like(p)
    start = num_steps - round(cfg.decay_fraction * num_steps)
    if cfg.decay_start >= 0:
        start = cfg.decay_start
        if start >= num_steps:
            raise ValueError(
                f"optim.decay_start={start} is not before the end of the run at step {num_steps}. "
                "Raise train.num_steps to the step at which the decay should end."
            )
    return start, lambda p: 1.0 - p
