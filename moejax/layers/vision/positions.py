"""Where a patch is: learned grid resized to its image, time of its frame, rotation by row, column.

Architecture section 8.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moejax.layers.param import wide
from moejax.typing import Array, Float, Int

_BASE = 10000.0  # of the rotation and of the time vector


def _bilinear(place: jax.Array, size: jax.Array, grid: int) -> tuple[jax.Array, jax.Array]:
    source = jnp.maximum((place + 0.5) * (grid / size) - 0.5, 0)
    first = jnp.minimum(source.astype(jnp.int32), grid - 1)
    share = source - first
    taps = jnp.stack([first, jnp.minimum(first + 1, grid - 1)], -1)
    return taps, jnp.stack([1 - share, share], -1)


def _bicubic(place: jax.Array, size: jax.Array, grid: int) -> tuple[jax.Array, jax.Array]:
    source = (place + 0.5) * (grid / size) - 0.5
    first = jnp.floor(source)
    share = source - first
    distances = jnp.stack([1 + share, share, 1 - share, 2 - share], -1)
    taps = first.astype(jnp.int32)[..., None] + jnp.arange(-1, 3, dtype=jnp.int32)
    return jnp.clip(taps, 0, grid - 1), _cubic(distances)


def _cubic(x: jax.Array, a: float = -0.75) -> jax.Array:
    """Cubic convolution kernel at distances of 0 to 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return jnp.where(x <= 1, near, far)


_RESIZES = {"bilinear": _bilinear, "bicubic": _bicubic}


def grid_positions(
    places_BZ4: Int[Array, "B Z 4"], table_GGD: Float[Array, "G G D"], resize: str
) -> Float[Array, "B Z D"]:
    """The learned grid resized to each patch's image, read at the patch.

    As `torch.nn.functional.interpolate(align_corners=False)` without antialiasing resizes.

    Args:
      places_BZ4: row, column, rows of the image, columns of the image.
      table_GGD: the grid.
      resize: "bilinear" or "bicubic".
    """
    grid, _, dim = table_GGD.shape
    row, column, rows, columns = (places_BZ4[..., i] for i in range(4))
    full = wide(table_GGD.dtype)
    taps_r, weights_r = _RESIZES[resize](row.astype(full), jnp.maximum(rows, 1), grid)
    taps_c, weights_c = _RESIZES[resize](column.astype(full), jnp.maximum(columns, 1), grid)
    flat_table = table_GGD.reshape(-1, dim)
    total_BZD = jnp.zeros((), full)
    for i in range(taps_r.shape[-1]):
        for j in range(taps_c.shape[-1]):
            rows_BZD = flat_table[taps_r[..., i] * grid + taps_c[..., j]]
            total_BZD = total_BZD + (weights_r[..., i] * weights_c[..., j])[..., None] * rows_BZD
    return total_BZD


def frame_vector(frames_BZ: Int[Array, "B Z"], dim: int) -> Float[Array, "B Z D"]:
    """Sines, then cosines of the frame's number; 0 in still images (frame -1). float32."""
    frequency = _BASE ** -(jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angle = frames_BZ[..., None].astype(jnp.float32) * frequency
    vector = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    return jnp.where(frames_BZ[..., None] >= 0, vector, 0)


def turns(places_BZ4: Int[Array, "B Z 4"], head_dim: int) -> Float[Array, "B Z h"]:
    """Angle of every pair of a head: columns turn the even pairs, rows the odd ones. float32."""
    pairs = head_dim // 4
    frequency = _BASE ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
    row, column = (places_BZ4[..., i, None].astype(jnp.float32) * frequency for i in (0, 1))
    return jnp.stack([column, row], -1).reshape(*places_BZ4.shape[:-1], 2 * pairs)


def turned(x_BZNH: Float[Array, "B Z N H"], angles_BZh: jax.Array) -> Float[Array, "B Z N H"]:
    """Neighbouring pairs turned by the angles, in float32.

    First members come out first, then second members: scores of two such vectors are the same.
    """
    x_wide = x_BZNH.astype(wide(x_BZNH.dtype))
    cos, sin = jnp.cos(angles_BZh)[:, :, None], jnp.sin(angles_BZh)[:, :, None]
    a, b = x_wide[..., 0::2], x_wide[..., 1::2]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x_BZNH.dtype)
