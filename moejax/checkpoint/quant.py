"""Codecs of quantised Hugging Face weights: MXFP4 (K3's experts) and fp8 in blocks (DeepSeek).

Decoding is exact. Encoding with the scales that a checkpoint came with gives its bytes back.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from moejax.checkpoint.layout import CheckpointError

MXFP4_BLOCK = 32
FP8_BLOCK = 128
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_FP8_MAX = 448.0
# Elements decoded at a time: the float32 in between stays in the cache.
_PIECE = 1 << 17

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([_E2M1, -_E2M1])
# Both values of a byte, low nibble first, as one 64-bit word: one look-up per byte.
_PAIRS = np.ascontiguousarray(
    np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], -1)
).view(np.uint64)[:, 0]
# 2^(byte - 127); 255 is NaN.
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)


def _out_dtype(dtype: Any) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(np.float32), _BF16):
        raise CheckpointError(f"weights decode to float32 or bfloat16, not to {dtype}.")
    return dtype


def mxfp4_decode(packed: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Values of MXFP4: E2M1 code times 2^(scale byte - 127), exact in both output types.

    Rows may be decoded alone: pass the same rows of both arrays.

    Args:
      packed: uint8 [..., n/2], two codes a byte, low nibble first.
      scales: uint8 [..., n/32], one E8M0 exponent per 32 values of the last dimension.
      dtype: float32 or bfloat16.
    Returns:
      [..., n]; -0 stays -0, a scale of 255 gives NaN, values beyond the type are infinite.
    Raises:
      CheckpointError: shapes that do not belong together.
    Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3.
    """
    dtype, width = _out_dtype(dtype), packed.shape[-1] * 2 if packed.ndim else 0
    if (*packed.shape[:-1], width) != (*scales.shape[:-1], scales.shape[-1] * MXFP4_BLOCK):
        raise CheckpointError(
            f"mxfp4 codes {packed.shape} need one scale per {MXFP4_BLOCK // 2} bytes, not "
            f"{scales.shape}."
        )
    out = np.empty(packed.size * 2, dtype)
    # Blocks are independent: rows do not matter, only pieces of whole blocks.
    codes_N = np.ascontiguousarray(packed).reshape(-1)
    scales_N = np.ascontiguousarray(scales).reshape(-1)
    for start in range(0, out.size, _PIECE):
        values = _PAIRS[codes_N[start // 2 : (start + _PIECE) // 2]].view(np.float32)
        factor = _SCALES[scales_N[start // MXFP4_BLOCK : (start + _PIECE) // MXFP4_BLOCK]]
        with np.errstate(over="ignore", invalid="ignore"):
            values.reshape(-1, MXFP4_BLOCK)[...] *= factor[:, None]
        piece = out[start : start + _PIECE]
        if dtype == _BF16:  # two significant bits: the upper half of float32 is all of it
            piece.view(np.uint16)[...] = values.view(np.uint32) >> 16
        else:
            piece[...] = values
    return out.reshape(*packed.shape[:-1], width)


def mxfp4_scales(values: np.ndarray) -> np.ndarray:
    """Scale bytes by the OCP rule: floor(log2(largest of the block)) - 2 + 127, within 0 to 254.

    A block of zeros has 127. Values that came from MXFP4 stay exact under this rule, though its
    bytes may differ from those they came from (2 x 0.5 is 1 x 1).
    """
    blocks = np.abs(values.astype(np.float32)).reshape(*values.shape[:-1], -1, MXFP4_BLOCK)
    amax = blocks.max(axis=-1, initial=0)
    if not np.isfinite(amax).all():
        raise CheckpointError("mxfp4 has no infinity and no NaN; the weights have.")
    exponent = np.frexp(amax)[1] - 1  # floor(log2), subnormals included
    return np.where(amax > 0, np.clip(exponent - 2 + 127, 0, 254), 127).astype(np.uint8)


def mxfp4_encode(
    values: np.ndarray, scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 bytes of values: the nearest code, ties to the even one, beyond 6 the code of 6.

    Args:
      values: float32 or bfloat16 [..., n], n a multiple of 32, finite.
      scales: uint8 [..., n/32]; None chooses them by `mxfp4_scales`. With the scales they were
        decoded with, values give their old bytes.
    Returns:
      packed uint8 [..., n/2], scales uint8 [..., n/32].
    Raises:
      CheckpointError: a width that is no multiple of 32, infinity or NaN.
    """
    if values.ndim == 0 or values.shape[-1] % MXFP4_BLOCK:
        raise CheckpointError(
            f"mxfp4 needs a last dimension in blocks of {MXFP4_BLOCK}, not {values.shape}."
        )
    if scales is None:
        scales = mxfp4_scales(values)
    blocks = values.shape[-1] // MXFP4_BLOCK
    if scales.shape != (*values.shape[:-1], blocks):
        raise CheckpointError(f"mxfp4 values {values.shape} do not fit scales {scales.shape}.")
    packed = np.empty(values.size // 2, np.uint8)
    flat_N, scales_N = values.reshape(-1), np.ascontiguousarray(scales).reshape(-1)
    for start in range(0, flat_N.size, _PIECE):
        piece = flat_N[start : start + _PIECE].astype(np.float32)
        shift = 127 - scales_N[start // 32 : (start + _PIECE) // 32].astype(np.int32)
        scaled = np.ldexp(piece.reshape(-1, MXFP4_BLOCK), shift[:, None]).reshape(-1)
        codes = _nearest_code(scaled)
        packed[start // 2 : (start + _PIECE) // 2] = codes[::2] | codes[1::2] << 4
    return packed.reshape(*values.shape[:-1], values.shape[-1] // 2), scales


def _nearest_code(scaled: np.ndarray) -> np.ndarray:
    """E2M1 codes; a midpoint goes to the code whose last bit is 0."""
    if not np.isfinite(scaled).all():
        raise CheckpointError("mxfp4 has no infinity and no NaN; the weights have.")
    size = np.abs(scaled)
    codes = np.signbit(scaled).astype(np.uint8) << 3
    for midpoint, up in (
        (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
        (5.0, False),
    ):  # fmt: skip
        codes += size >= midpoint if up else size > midpoint
    return codes


def _row_scales(
    scale_inv: np.ndarray, shape: tuple[int, ...], first_row: int, block: int
) -> np.ndarray:
    """Scales [rows of blocks, columns of blocks] as [rows of `shape`, columns of blocks]."""
    rows, columns = shape
    need = -(-(first_row + rows) // block), -(-columns // block)
    if scale_inv.ndim != 2 or scale_inv.shape[0] < need[0] or scale_inv.shape[1] != need[1]:
        raise CheckpointError(
            f"fp8 weights of {rows} x {columns} from row {first_row} need scales {need}, one per "
            f"{block} x {block} block, not {scale_inv.shape}."
        )
    return scale_inv.astype(np.float32)[(first_row + np.arange(rows)) // block]


def _by_blocks(apply: np.ufunc, values: np.ndarray, scales: np.ndarray, block: int) -> None:
    """In place, each `block` columns of `values` with their scale; the last may be fewer."""
    rows, columns = values.shape
    whole = columns // block * block
    left = values[:, :whole].reshape(rows, columns // block, block)  # a view
    apply(left, scales[:, : whole // block, None], out=left)
    if whole < columns:
        apply(values[:, whole:], scales[:, -1:], out=values[:, whole:])


def fp8_block_decode(
    codes: np.ndarray,
    scale_inv: np.ndarray,
    *,
    block: int = FP8_BLOCK,
    first_row: int = 0,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Values of fp8 weights: code times the scale of its block (the last ones may be partial).

    Args:
      codes: float8_e4m3fn or uint8 [rows, columns].
      scale_inv: float32 [ceil(all rows / block), ceil(columns / block)].
      block: rows and columns that share a scale.
      first_row: number of the first of `codes` in the whole matrix, to decode some rows of it.
      dtype: float32, or bfloat16 (the float32 product rounded to nearest even).
    Returns:
      [rows, columns].
    Raises:
      CheckpointError: scales that do not cover the codes.
    """
    dtype = _out_dtype(dtype)
    if codes.ndim != 2 or codes.dtype.itemsize != 1:
        raise CheckpointError(f"fp8 weights are matrices, not {codes.dtype}{codes.shape}.")
    scales_RC = _row_scales(scale_inv, codes.shape, first_row, block)
    rows, columns = codes.shape
    out = np.empty(codes.shape, dtype)
    step = max(1, _PIECE // max(columns, 1))
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        values = _FP8_VALUES[np.ascontiguousarray(codes[piece]).view(np.uint8)]
        _by_blocks(np.multiply, values, scales_RC[piece], block)
        out[piece] = values
    return out


def fp8_block_encode(
    values: np.ndarray, scale_inv: np.ndarray | None = None, *, block: int = FP8_BLOCK
) -> tuple[np.ndarray, np.ndarray]:
    """fp8 codes of a matrix: the value over its block's scale, to nearest even, within +-448.

    Args:
      values: float32 or bfloat16 [rows, columns].
      scale_inv: float32 scales to use; None takes largest / 448 of each block, 1 for zeros. With
        the scales they were decoded with, values give their old codes.
      block: rows and columns that share a scale.
    Returns:
      codes float8_e4m3fn [rows, columns], scale_inv float32 [blocks of rows, blocks of columns].
    Raises:
      CheckpointError: not a matrix, or scales that do not cover it.
    """
    if values.ndim != 2:
        raise CheckpointError(f"fp8 weights are matrices, not of shape {values.shape}.")
    rows, columns = values.shape
    if scale_inv is None:
        padded = np.pad(
            np.abs(values.astype(np.float32)), ((0, -rows % block), (0, -columns % block))
        )
        tiles = padded.reshape(-(-rows // block), block, -(-columns // block), block)
        amax = tiles.max(axis=(1, 3), initial=0)
        scale_inv = np.where(amax > 0, amax / np.float32(_FP8_MAX), 1).astype(np.float32)
    scales_RC = _row_scales(scale_inv, values.shape, 0, block)
    codes = np.empty(values.shape, _FP8)
    step = max(1, _PIECE // max(columns, 1))
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        scaled = values[piece].astype(np.float32)
        _by_blocks(np.divide, scaled, scales_RC[piece], block)
        codes[piece] = np.clip(scaled, -_FP8_MAX, _FP8_MAX).astype(_FP8)
    return codes, scale_inv
