"""Rotary positions with YaRN: interleaved or half-split pairs (architecture section 3)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from moejax.config import MlaConfig
from moejax.typing import Array, Float


def frequencies(cfg: MlaConfig) -> tuple[np.ndarray, float]:
    """Angle a position for each pair [R/2] (float64), and the factor on cos and sin."""
    R = cfg.rope_dim
    i = np.arange(R // 2)
    freq = cfg.rope_theta ** (-2.0 * i / R)
    if cfg.yarn_factor == 1.0:
        return freq, 1.0
    ramp = _yarn_ramp(cfg, i)
    blended = (1 - ramp) * freq + ramp * freq / cfg.yarn_factor
    return blended, _yarn_m(cfg, cfg.yarn_mscale) / _yarn_m(cfg, cfg.yarn_mscale_all_dim)


def softmax_scale_factor(cfg: MlaConfig) -> float:
    """What YaRN multiplies the softmax scale by; 1 without it and without rotation."""
    if cfg.rope == "none" or cfg.yarn_factor == 1.0:
        return 1.0
    return _yarn_m(cfg, cfg.yarn_mscale_all_dim) ** 2


def _yarn_m(cfg: MlaConfig, scale: float) -> float:
    return 0.1 * scale * math.log(cfg.yarn_factor) + 1.0


def _yarn_ramp(cfg: MlaConfig, i: np.ndarray) -> np.ndarray:
    """0 where a frequency is kept, 1 where it is divided by the factor."""
    R, length = cfg.rope_dim, cfg.yarn_original_length

    def index_with(turns: float) -> float:
        return R * math.log(length / (2 * math.pi * turns)) / (2 * math.log(cfg.rope_theta))

    low = max(math.floor(index_with(cfg.yarn_beta_fast)), 0)
    high = min(math.ceil(index_with(cfg.yarn_beta_slow)), R - 1)
    return np.clip((i - low) / max(high - low, 0.001), 0, 1)


def rotate(x: Float[Array, "B T N R"], cfg: MlaConfig, pairs: str) -> Float[Array, "B T N R"]:
    """Turns each pair (a, b) of the last dim by position times frequency, in float32.

    Args:
      pairs: "interleaved" (2i, 2i+1), "half" (i, i + R/2) or "none".
    Positions run on through a packed row: scores see differences only.
    """
    if pairs == "none":
        return x
    freq, magnitude = frequencies(cfg)
    angle = np.arange(x.shape[1])[:, None, None] * freq  # float64: 1 M positions keep their phase
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (jnp.asarray(magnitude * f(angle), dtype) for f in (np.cos, np.sin))
    x_wide = x.astype(dtype)
    if pairs == "interleaved":
        a, b = x_wide[..., 0::2], x_wide[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    else:
        a, b = jnp.split(x_wide, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.astype(x.dtype)
