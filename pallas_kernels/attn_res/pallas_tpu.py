"""attn_res on TPUs: all sources of some tokens lie on the chip while they are scored and mixed."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _tpu
from pallas_kernels.attn_res.tiles import tiles_for

# Blocks of sources, their gradients and copies in flight; with float32 values on the way it is 1.6
# times as much (compiled: 13.5 MB for 8.3 MB), which the chips have though 16 MiB is their default.
_MAX_BYTES = 12 * 2**20
_VMEM_BYTES = 32 * 2**20


def attn_res(query_D, norm_weight_D, sources_XBTD, *, num_sources, eps):
    """Mix over depth; sources that do not count are read and left out."""
    num_given, *batch, width = sources_XBTD.shape
    if any(a.dtype == jnp.float64 for a in (query_D, norm_weight_D, sources_XBTD)):
        raise NotImplementedError("float64 has no kernel")
    if 0 in sources_XBTD.shape:
        raise NotImplementedError("an empty array needs no kernel")
    itemsize = sources_XBTD.dtype.itemsize
    least = 4 * 16 * num_given * width * itemsize
    if least > _MAX_BYTES:
        raise NotImplementedError(
            f"{num_given} sources of width {width} of 16 tokens take {least} bytes of on-chip "
            f"memory with their gradients, more than {_MAX_BYTES}"
        )
    fused_1D = (query_D.astype(jnp.float32) * norm_weight_D.astype(jnp.float32))[None]
    mix_MD = _mix(
        float(eps), fused_1D, sources_XBTD.reshape(num_given, -1, width),
        jnp.asarray(num_sources, jnp.int32).reshape(1),
    )  # fmt: skip
    return mix_MD.reshape(*batch, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps, fused_1D, sources_XMD, num_1):
    blocks = _Blocks.of(sources_XMD, eps)
    return blocks.call(
        _forward_body, "attn_res", (num_1, fused_1D, sources_XMD), (blocks.query, blocks.sources),
        blocks.tokens, jax.ShapeDtypeStruct(sources_XMD.shape[1:], sources_XMD.dtype),
    )  # fmt: skip


def _mix_fwd(eps, *args):
    return _mix(eps, *args), args


def _mix_bwd(eps, args, d_mix_MD):
    fused_1D, sources_XMD, num_1 = args
    blocks = _Blocks.of(sources_XMD, eps)
    d_sources_XMD, d_fused_1D = blocks.call(
        _backward_body, "attn_res_grad", (num_1, fused_1D, sources_XMD, d_mix_MD),
        (blocks.query, blocks.sources, blocks.tokens), (blocks.sources, blocks.query),
        [
            jax.ShapeDtypeStruct(sources_XMD.shape, sources_XMD.dtype),
            jax.ShapeDtypeStruct(fused_1D.shape, jnp.float32),
        ],
    )  # fmt: skip
    return d_fused_1D, d_sources_XMD, None


_mix.defvjp(_mix_fwd, _mix_bwd)


class _Blocks(NamedTuple):
    """Sizes, and what of each array a step of the grid has."""

    num_sources: int
    num_tokens: int
    width: int
    size: int  # tokens of a step
    eps: float

    @classmethod
    def of(cls, sources_XMD, eps):
        num_sources, num_tokens, width = sources_XMD.shape
        tiles = tiles_for(num_sources, width, sources_XMD.dtype.itemsize, "v5p")
        return cls(num_sources, num_tokens, width, min(tiles.tokens, num_tokens), eps)

    @property
    def query(self):
        return pl.BlockSpec((1, self.width), lambda i, num: (0, 0))

    @property
    def sources(self):
        return pl.BlockSpec((self.num_sources, self.size, self.width), lambda i, num: (0, i, 0))

    @property
    def tokens(self):
        return pl.BlockSpec((self.size, self.width), lambda i, num: (i, 0))

    def call(self, body, name, given, in_specs, out_specs, out_shape):
        return _tpu.call(
            functools.partial(body, self), name=name, grid=(pl.cdiv(self.num_tokens, self.size),),
            in_specs=in_specs, out_specs=out_specs, out_shape=out_shape, num_prefetch=1,
            vmem_bytes=_VMEM_BYTES,
        )(*given)  # fmt: skip

    def source(self, sources_ref, m, num):
        """Source m in float32, 0 where it does not count or there is no token."""
        token_m1 = pl.program_id(0) * self.size + lax.broadcasted_iota(jnp.int32, (self.size, 1), 0)
        return jnp.where(
            (token_m1 < self.num_tokens) & (m < num), sources_ref[m].astype(jnp.float32), 0
        )

    def scores(self, x_mD, fused_1D):
        """Logit and 1 / rms, [m, 1]."""
        inverse_m1 = lax.rsqrt(jnp.sum(x_mD * x_mD, axis=1, keepdims=True) / self.width + self.eps)
        return jnp.sum(x_mD * fused_1D, axis=1, keepdims=True) * inverse_m1, inverse_m1


def _forward_body(blocks, num_ref, fused_ref, sources_ref, out_ref):
    num, fused_1D = num_ref[0], fused_ref[...]
    mix_mD = jnp.zeros((blocks.size, blocks.width), jnp.float32)
    top_m1 = jnp.full((blocks.size, 1), -jnp.inf, jnp.float32)
    total_m1 = jnp.zeros((blocks.size, 1), jnp.float32)
    for m in range(blocks.num_sources):
        x_mD = blocks.source(sources_ref, m, num)
        logit_m1, _ = blocks.scores(x_mD, fused_1D)
        # source 0 always counts, so that from there on the largest logit is finite
        new_top_m1 = jnp.where(m < num, jnp.maximum(top_m1, logit_m1), top_m1)
        old_m1 = jnp.exp(top_m1 - new_top_m1)
        new_m1 = jnp.where(m < num, jnp.exp(logit_m1 - new_top_m1), 0)
        mix_mD = mix_mD * old_m1 + x_mD * new_m1
        top_m1, total_m1 = new_top_m1, total_m1 * old_m1 + new_m1
    out_ref[...] = (mix_mD / total_m1).astype(out_ref.dtype)


def _backward_body(blocks, num_ref, fused_ref, sources_ref, d_mix_ref, d_sources_ref, d_fused_ref):
    num, fused_1D = num_ref[0], fused_ref[...]
    d_mix_mD = d_mix_ref[...].astype(jnp.float32)
    logits, inverses, dots = [], [], []
    for m in range(blocks.num_sources):
        x_mD = blocks.source(sources_ref, m, num)
        logit_m1, inverse_m1 = blocks.scores(x_mD, fused_1D)
        logits.append(jnp.where(m < num, logit_m1, -jnp.inf))
        inverses.append(inverse_m1)
        dots.append(jnp.sum(x_mD * d_mix_mD, axis=1, keepdims=True))
    top_m1 = functools.reduce(jnp.maximum, logits)
    weights = [jnp.exp(logit_m1 - top_m1) for logit_m1 in logits]
    total_m1 = sum(weights)
    weights = [weight_m1 / total_m1 for weight_m1 in weights]
    mean_m1 = sum(a * b for a, b in zip(weights, dots, strict=True))

    @pl.when(pl.program_id(0) == 0)
    def _():
        d_fused_ref[...] = jnp.zeros_like(d_fused_ref)

    for m in range(blocks.num_sources):
        x_mD = blocks.source(sources_ref, m, num)
        scale_m1 = weights[m] * (dots[m] - mean_m1) * inverses[m]
        finite_m1 = jnp.where(m < num, logits[m], 0)
        length_m1 = scale_m1 * inverses[m] * finite_m1 / blocks.width
        d_x_mD = weights[m] * d_mix_mD + scale_m1 * fused_1D - length_m1 * x_mD
        d_sources_ref[m] = jnp.where(m < num, d_x_mD, 0).astype(d_sources_ref.dtype)
        # a row past the last token is 0 here, but its scale may be anything
        real_mD = jnp.where(x_mD == 0, 0, scale_m1 * x_mD)
        d_fused_ref[...] += jnp.sum(real_mD, axis=0, keepdims=True)
