"""Rotary positions with YaRN: interleaved or half-split pairs (architecture section 3)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
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


class At(NamedTuple):
    """Where one token stands when it comes alone, as in decoding.

    Attributes:
      position: int32 scalar, which may be traced.
      limit: a static bound that no position reaches.
    """

    position: jax.Array
    limit: int


_BLOCK = 1024


def _turn_at(freq: np.ndarray, at: At, dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position times frequency, [R/2], for a traced position.

    By the addition theorem from two small tables, of the whole blocks and of the rest: a float32
    product would lose the phase of far positions, and one table would hold every position.
    """
    tables = []
    for rows, unit in ((min(_BLOCK, at.limit), 1), (-(-at.limit // _BLOCK), _BLOCK)):
        angle = np.arange(rows)[:, None] * unit * freq
        tables.append([jnp.asarray(f(angle), dtype) for f in (np.cos, np.sin)])
    (cos_a, sin_a), (cos_b, sin_b) = tables
    rest, block = at.position % _BLOCK, at.position // _BLOCK
    cos_a, sin_a, cos_b, sin_b = cos_a[rest], sin_a[rest], cos_b[block], sin_b[block]
    return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b


def rotate(
    x: Float[Array, "B T N R"], cfg: MlaConfig, pairs: str, at: At | None = None
) -> Float[Array, "B T N R"]:
    """Turns each pair (a, b) of the last dim by position times frequency, in float32.

    Args:
      pairs: "interleaved" (2i, 2i+1), "half" (i, i + R/2) or "none".
      at: where the row's only token stands; None counts positions from 0.
    Positions run on through a packed row: scores see differences only.
    """
    if pairs == "none":
        return x
    freq, magnitude = frequencies(cfg)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if at is None:
        angle = np.arange(x.shape[1])[:, None, None] * freq  # float64: 1 M positions keep phase
        cos, sin = (jnp.asarray(magnitude * f(angle), dtype) for f in (np.cos, np.sin))
    else:
        cos, sin = (magnitude * a for a in _turn_at(freq, at, dtype))
    x_wide = x.astype(dtype)
    if pairs == "interleaved":
        a, b = x_wide[..., 0::2], x_wide[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    else:
        a, b = jnp.split(x_wide, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.astype(x.dtype)
