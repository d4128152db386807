"""Frozen linear maps kept in 8 bits: a code for each value, a scale for each output channel.

A layer is built, and its parameters are stored, with codes in a map's place and their scales beside
it. Before it runs the maps are put back (:func:`dequantised`), inside the loop over layers and
inside rematerialisation, so that one layer's exist at a time; the layer itself knows nothing of it.
Without rematerialisation (`train.remat="none"`) the backward pass keeps those of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moejax.layers.param import wide
from moejax.partitioning import constrain

Layer = TypeVar("Layer", bound=nnx.Module)

# Of every format: type of the codes, the largest of them, bits that its scales have not.
_FORMATS = {"int8": (jnp.int8, 127.0, 16), "fp8": (jnp.float8_e4m3fn, 448.0, 23)}
_SUFFIX = "_scale"
# Modules of a layer that stay as they are: routed experts have a format of their own, the router
# decides by the last bits, adapters are trained.
_LEFT_OUT = ("experts", "router", "lora")
# A map of fewer values than this share of a [dim, dim] one stays too: betas, decay and low-rank
# gate factors, index keys. It would save nothing.
_SMALL = 1 / 32


def encode(value: jax.Array, form: str, in_axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of a linear map: ``value ~ codes * scale``, one scale an output channel.

    int8: codes are whole numbers up to 127, nearest, ties to even; the scale is the largest
    magnitude of the channel over 127, rounded up to 8 bits of mantissa. fp8: codes are E4M3 numbers
    up to 448, nearest, ties to even; the scale is the smallest power of two that lets the largest
    magnitude fit. Such scales are exact in bfloat16, and the codes do not depend on how a device
    divides: they are the same wherever a base is read.

    Args:
      value: [..., in, *out], any float type.
      form: "int8" or "fp8".
      in_axis: which dim is `in`.
    Returns:
      Codes [..., in, *out] and float32 scales [..., *out].
    """
    dtype, largest, dropped_bits = _FORMATS[form]
    value = value.astype(jnp.float32)
    amax = jnp.max(jnp.abs(value), axis=in_axis, keepdims=True)
    scale = _rounded_up(jnp.where(amax > 2.0**-100, amax, 2.0**-100) * (1 / largest), dropped_bits)
    codes = _whole(value, scale) if form == "int8" else _e4m3(value * _inverse(scale))
    return codes.astype(dtype), jnp.squeeze(scale, in_axis)


def decode(codes: jax.Array, scale: jax.Array, dtype: Any, in_axis: int = 0) -> jax.Array:
    """``codes * scale``, rounded once to `dtype`."""
    full = wide(dtype)
    return (codes.astype(full) * jnp.expand_dims(scale, in_axis).astype(full)).astype(dtype)


def _rounded_up(x: jax.Array, dropped_bits: int) -> jax.Array:
    """A positive float32, up to the next one whose last bits are 0."""
    mask = (1 << dropped_bits) - 1
    bits = (lax.bitcast_convert_type(x, jnp.int32) + mask) & ~mask
    return lax.bitcast_convert_type(bits, jnp.float32)


def _inverse(x: jax.Array) -> jax.Array:
    """1/x of a power of two, exactly."""
    bits = (2 * 127 << 23) - lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _whole(value: jax.Array, scale: jax.Array) -> jax.Array:
    """The whole number nearest to value / scale, ties to even.

    A quotient may be off by its last bit, so what is left of the value decides: it is exact, the
    scale having few bits.
    """
    guess = jnp.round(value / scale)
    rest, half = value - guess * scale, scale / 2
    is_tie, is_odd = jnp.abs(rest) == half, guess % 2 != 0
    return jnp.where((jnp.abs(rest) > half) | is_tie & is_odd, guess + jnp.sign(rest), guess)


def _e4m3(x: jax.Array) -> jax.Array:
    """x on the grid of E4M3: 3 bits of mantissa, steps of 2^-9 below 2^-6."""
    fine = jnp.round(x * 2.0**9) * 2.0**-9
    return jnp.where(jnp.abs(x) < 2.0**-6, fine, lax.reduce_precision(x, 8, 3))


def format_of(dtype: Any) -> str | None:
    """The format whose codes have this type; None for plain numbers and for packed ones."""
    return next((form for form, (codes, *_) in _FORMATS.items() if dtype == codes), None)


def scale_name(name: str) -> str:
    """Name of the scales of a map."""
    return name + _SUFFIX


def is_scale(name: str) -> bool:
    """Whether a parameter of this name is the scales of a map."""
    return name.endswith(_SUFFIX)


def is_coded(name: str, dtype: Any) -> bool:
    """Whether a parameter has a type of its own: codes, packed codes, or their scales."""
    return dtype == jnp.uint8 or format_of(dtype) is not None or is_scale(name)


def quantise(layer: nnx.Module, dim: int, form: str) -> None:
    """Puts codes in the place of a layer's large maps, and their scales beside them.

    Args:
      layer: with fresh parameters and no adapters yet.
      dim: the model's width, by which maps are large or small.
      form: see :func:`encode`; "plain" leaves all as it is.
    """
    if form == "plain":
        return
    for owner, leaf, param in list(_params(layer)):
        about = param.get_metadata()
        if about["matrix"] is None or param.size < _SMALL * dim * dim:
            continue
        codes, scale = encode(param[...], form)
        setattr(owner, leaf, _like(param, codes))
        axes = tuple(about["axes"])[1:]
        scales = nnx.Param(scale, axes=axes, matrix=None, head_axis=None)
        setattr(owner, scale_name(leaf), scales)


def as_bytes(tree: Any) -> Any:
    """The tree with float8 arrays as bytes: for a loop, which XLA may run on wider copies of them.

    Compilers without float8 arithmetic turn whole stacks into float16; bytes they leave alone.
    """
    fp8 = _FORMATS["fp8"][0]
    return jax.tree.map(
        lambda a: lax.bitcast_convert_type(a, jnp.uint8) if a.dtype == fp8 else a, tree
    )


def dequantised(layer: Layer, dtype: Any) -> Layer:
    """The layer with plain maps in the place of codes, ``codes * scale`` in the compute dtype.

    Codes are gathered, not values: a byte for each on the wire. The layer is changed.

    Args:
      layer: out of a tree that went through :func:`as_bytes`.
      dtype: that of the layer's inputs.
    """
    for owner, leaf, param in list(_params(layer)):
        scale = getattr(owner, scale_name(leaf), None)
        if scale is None:
            continue
        codes, scales = (constrain(p[...], p.get_metadata()["axes"]) for p in (param, scale))
        if codes.dtype == jnp.uint8:
            codes = lax.bitcast_convert_type(codes, _FORMATS["fp8"][0])
        setattr(owner, leaf, _like(param, decode(codes, scales, dtype)))
        delattr(owner, scale_name(leaf))
    return layer


def _like(param: nnx.Param, value: jax.Array) -> nnx.Param:
    about = param.get_metadata()
    return nnx.Param(value, **{name: about[name] for name in ("axes", "matrix", "head_axis")})


def _params(module: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Param]]:
    """Parameters of a module and those below it, with who holds them and as what."""
    for name, child in vars(module).items():
        if isinstance(child, nnx.Param):
            yield module, name, child
        elif isinstance(child, nnx.Module) and name not in _LEFT_OUT:
            yield from _params(child)
