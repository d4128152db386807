"""MXFP4 weights packed along their input dim: decoded where they are used, encoded for a start."""

import jax.numpy as jnp
from jax import lax

BLOCK = 32  # values that share a scale


def decode(packed, scales, dtype):
    """E2M1 codes times 2^(scale - 127), exact in float32 and bfloat16.

    The bits of the result are put together by integer arithmetic: no look-up (slow on TPUs), and no
    product that a device could flush to 0. -0 stays; a scale of 255 gives NaN.

    Args:
      packed: uint8 [..., K/2, F], two codes along K a byte, low nibble first.
      scales: uint8 [..., K/32, F].
      dtype: of the result.
    Returns:
      [..., K, F].
    Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3.
    """
    *outer, half, width = packed.shape
    blocks = half * 2 // BLOCK
    bytes_ = packed.reshape(*outer, blocks, BLOCK // 2, 1, width).astype(jnp.int32)
    code = (bytes_ >> jnp.array([0, 4], jnp.int32)[:, None]) & 15
    scale = scales.reshape(*outer, blocks, 1, 1, width).astype(jnp.int32)
    bits = bits_of(code, scale).reshape(*outer, half * 2, width)
    return values_of(bits, dtype)


def bits_of(code, scale):
    """Bits of the bfloat16 of E2M1 codes under E8M0 scales, all int32 of shapes that broadcast."""
    size = code & 7
    # Exponent and mantissa of a code, moved to those of a bfloat16, only miss the scale; 0.5 is
    # the one that E2M1 writes without its leading 1.
    bits = (size << 6) + ((scale - 1) << 7)
    bits = jnp.where((size == 1) & (scale > 1), bits - 64, bits)
    bits = jnp.where((size < 4) & (scale == 0), size << 5, bits)  # below bfloat16's normal range
    bits = jnp.where(size == 0, 0, jnp.minimum(bits, 0x7F80))
    return jnp.where(scale == 255, 0x7FC0, bits) | ((code & 8) << 12)


def values_of(bits, dtype):
    """Numbers whose bfloat16 has the int32 `bits`, in `dtype`."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(bits << 16, jnp.float32).astype(dtype)


def encode(values):
    """Nearest codes (ties to even) under the scales of the OCP rule.

    Args:
      values: [..., K, F], K a multiple of 32, finite and far from the ends of float32's range.
    Returns:
      packed uint8 [..., K/2, F], scales uint8 [..., K/32, F].
    """
    *outer, k_dim, width = values.shape
    blocks = values.astype(jnp.float32).reshape(*outer, k_dim // BLOCK, BLOCK, width)
    largest = jnp.max(jnp.abs(blocks), axis=-2, keepdims=True)
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127  # floor(log2)
    scale = jnp.where(largest > 0, jnp.clip(exponent - 2 + 127, 1, 253), 127)
    scaled = blocks * lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    size = jnp.abs(scaled)
    code = jnp.where(jnp.signbit(scaled), 8, 0)
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += size > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += size >= midpoint
    pairs = code.astype(jnp.uint8).reshape(*outer, k_dim // 2, 2, width)
    packed = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return packed, scale.astype(jnp.uint8).reshape(*outer, k_dim // BLOCK, width)
