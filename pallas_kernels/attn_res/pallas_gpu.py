"""attn_res in one pass over the sources; its gradient reads them twice in a row.

A program has whole rows in its registers and goes through its tokens one after the other. What the
logits, the softmax over depth and the mix need of a source is all there when it has been read.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.attn_res.tiles import Tiles, tiles_for

# Values of a vector that 512 threads can hold, several vectors at a time; 16,384 spill 2.5 KB.
_MAX_WIDTH = 8192
_MAX_SOURCES = 64
# Rows on their way to a program while it works on one: of 14 KB, three on each of 132
# multiprocessors are what 4.3 TB/s at a microsecond of latency ask for. The gradient reads its rows
# twice, the second time one by one from the cache, and has no registers for more.
_DEPTH = 3
_DEPTH_OF_GRADIENT = 2


def attn_res(query_D, norm_weight_D, sources_XBTD, *, num_sources, eps):
    """Mix over depth; sources that do not count are not read."""
    num_given, *batch, width = sources_XBTD.shape
    if any(a.dtype == jnp.float64 for a in (query_D, norm_weight_D, sources_XBTD)):
        raise NotImplementedError("float64 has no kernel")
    if width > _MAX_WIDTH or num_given > _MAX_SOURCES:
        raise NotImplementedError(
            f"{num_given} sources of width {width} are more than {_MAX_SOURCES} of {_MAX_WIDTH}"
        )
    if 0 in sources_XBTD.shape:
        raise NotImplementedError("an empty array needs no kernel")
    fused_D = query_D.astype(jnp.float32) * norm_weight_D.astype(jnp.float32)
    mix_MD = _mix(
        float(eps), fused_D, sources_XBTD.reshape(num_given, -1, width),
        jnp.asarray(num_sources, jnp.int32).reshape(1),
    )  # fmt: skip
    return mix_MD.reshape(*batch, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps, fused_D, sources_XMD, num_1):
    rows = _Rows.of(sources_XMD, eps, forward=True)
    return rows.call(
        _forward_body, "attn_res", [num_1, fused_D, rows.flat(sources_XMD)],
        jax.ShapeDtypeStruct(sources_XMD.shape[1:], sources_XMD.dtype),
    )  # fmt: skip


def _mix_fwd(eps, *args):
    return _mix(eps, *args), args


def _mix_bwd(eps, args, d_mix_MD):
    fused_D, sources_XMD, num_1 = args
    rows = _Rows.of(sources_XMD, eps, forward=False)
    flat_RD = rows.flat(sources_XMD)
    d_flat_RD, d_fused_GD = rows.call(
        _backward_body, "attn_res_grad", [num_1, fused_D, flat_RD, d_mix_MD],
        [
            jax.ShapeDtypeStruct(flat_RD.shape, flat_RD.dtype),
            jax.ShapeDtypeStruct((rows.num_programs, rows.width), jnp.float32),
        ],
    )  # fmt: skip
    return jnp.sum(d_fused_GD, axis=0), d_flat_RD.reshape(sources_XMD.shape), None


_mix.defvjp(_mix_fwd, _mix_bwd)


class _Rows(NamedTuple):
    """Sizes, and how rows of `width` are held in vectors of a power of two."""

    num_sources: int
    num_tokens: int
    width: int
    tokens: int  # of a program
    warps: int
    eps: float

    @classmethod
    def of(cls, sources_XMD, eps, *, forward):
        num_sources, num_tokens, width = sources_XMD.shape
        tiles: Tiles = tiles_for(num_sources, width, sources_XMD.dtype.itemsize)
        tokens = tiles.tokens if forward else tiles.gradient_tokens
        return cls(num_sources, num_tokens, width, tokens, tiles.warps, eps)

    @property
    def num_programs(self) -> int:
        return pl.cdiv(self.num_tokens, self.tokens)

    def flat(self, sources_XMD):
        return sources_XMD.reshape(-1, self.width)

    def call(self, body, name, given, out):
        whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0,) * len(a.shape))  # noqa: E731
        return _gpu.call(
            functools.partial(body, self), name=name, grid=(self.num_programs,),
            in_specs=[whole(a) for a in given], out_specs=jax.tree.map(whole, out), out_shape=out,
            warps=self.warps,
        )(*given)  # fmt: skip

    def own_tokens(self):
        """First token of this program, and how many it has."""
        first = pl.program_id(0) * self.tokens
        return first, jnp.minimum(self.tokens, self.num_tokens - first)

    def vector(self, ref, row=None, when=True):
        """A row, 0 behind its end; not read unless `when`."""
        inside, size = self._inside() & when, _power_of_two(self.width)
        if _gpu.interpreted():  # which knows no slice that ends outside
            values = ref[:] if row is None else ref[row, :]
            values = jnp.pad(values, (0, size - self.width))
            return jnp.where(inside, values, jnp.zeros((), ref.dtype))
        return _gpu.load(ref.at[self._part()] if row is None else ref.at[row, self._part()], inside)

    def put(self, ref, row, vector):
        """Writes a row."""
        if _gpu.interpreted():
            ref[row, :] = vector[: self.width].astype(ref.dtype)
        else:
            _gpu.store(ref.at[row, self._part()], vector, self._inside())

    def _part(self):
        # a start that is traced: jax 0.12 refuses a slice that ends outside though a mask says so
        return pl.ds(pl.program_id(0) * 0, _power_of_two(self.width))

    def _inside(self):
        return jnp.arange(_power_of_two(self.width), dtype=jnp.int32) < self.width

    def pipeline(self, fetch, depth):
        """The first `depth` rows of a sequence on their way; `fetch(p)` starts reading its p-th."""
        return tuple(fetch(jnp.int32(p)) for p in range(depth))

    def each(self, fetch, begin, num, queue, body, init):
        """`body(i, x, carry)` for `num` rows from the begin-th on; keeps the queue filled."""

        def step(i, carry):
            queue, inner = carry
            last = fetch(begin + i + len(queue))
            return (*queue[1:], last), body(i, queue[0].astype(jnp.float32), inner)

        return lax.fori_loop(0, num, step, (queue, init))

    def in_order(self, rows_ref, first, count, num):
        """Fetches source p % num of the program's token p // num."""

        def fetch(p):
            row = p % num * self.num_tokens + first + p // num
            return self.vector(rows_ref, row, p < count * num)

        return fetch

    def inverse_rms(self, x):
        return lax.rsqrt(jnp.sum(x * x) / self.width + self.eps)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


def _forward_body(rows, num_ref, fused_ref, rows_ref, out_ref):
    first, count = rows.own_tokens()
    num, fused = num_ref[0], rows.vector(fused_ref)
    fetch = rows.in_order(rows_ref, first, count, num)

    def one_token(i, queue):
        def see(_, x, carry):
            mix, top, total = carry
            logit = jnp.sum(x * fused) * rows.inverse_rms(x)
            new_top = jnp.maximum(top, logit)
            old, new = jnp.exp(top - new_top), jnp.exp(logit - new_top)
            return mix * old + x * new, new_top, total * old + new

        init = jnp.zeros_like(fused), jnp.float32(-jnp.inf), jnp.float32(0)
        queue, (mix, _, total) = rows.each(fetch, i * num, num, queue, see, init)
        rows.put(out_ref, first + i, mix / total)
        return queue

    lax.fori_loop(0, count, one_token, rows.pipeline(fetch, _DEPTH))


def _backward_body(rows, num_ref, fused_ref, rows_ref, d_mix_ref, d_rows_ref, d_fused_ref):
    program = pl.program_id(0)
    first, count = rows.own_tokens()
    num, fused = num_ref[0], rows.vector(fused_ref)
    fetch = rows.in_order(rows_ref, first, count, num)
    source_x = jnp.arange(_power_of_two(rows.num_sources), dtype=jnp.int32)

    def one_token(i, carry):
        queue, d_fused = carry
        d_mix = rows.vector(d_mix_ref, first + i).astype(jnp.float32)
        queue, shares = _shares(rows, fetch, i * num, num, queue, fused, d_mix, source_x)

        def place(j):  # backwards: what was read last is the nearest
            return (num - 1 - j) * rows.num_tokens + first + i

        def push(j, x, d_fused):
            weight, scale, length = (
                jnp.sum(jnp.where(source_x == num - 1 - j, a, 0)) for a in shares
            )
            rows.put(d_rows_ref, place(j), weight * d_mix + scale * fused - length * x)
            return d_fused + scale * x

        def no_share(m, _):
            rows.put(d_rows_ref, m * rows.num_tokens + first + i, jnp.zeros_like(fused))

        again = lambda j: rows.vector(rows_ref, place(j), j < num)  # noqa: E731
        _, d_fused = rows.each(again, 0, num, rows.pipeline(again, 1), push, d_fused)
        lax.fori_loop(num, rows.num_sources, no_share, None)
        return queue, d_fused

    init = rows.pipeline(fetch, _DEPTH_OF_GRADIENT), jnp.zeros_like(fused)
    rows.put(d_fused_ref, program, lax.fori_loop(0, count, one_token, init)[1])


def _shares(rows, fetch, begin, num, queue, fused, d_mix, source_x):
    """Of each source: its weight, and the factors of `fused` and of itself in its gradient."""

    def see(m, x, carry):
        inverse = rows.inverse_rms(x)
        found = jnp.sum(x * fused) * inverse, inverse, jnp.sum(x * d_mix)
        return tuple(jnp.where(source_x == m, a, b) for a, b in zip(found, carry, strict=True))

    zeros_x = jnp.zeros(source_x.shape, jnp.float32)
    queue, (logit_x, inverse_x, d_weight_x) = rows.each(
        fetch, begin, num, queue, see, (zeros_x, zeros_x, zeros_x)
    )
    top = jnp.max(jnp.where(source_x < num, logit_x, -jnp.inf))
    weight_x = jnp.where(source_x < num, jnp.exp(logit_x - top), 0)
    weight_x = weight_x / jnp.sum(weight_x)
    scale_x = weight_x * (d_weight_x - jnp.sum(weight_x * d_weight_x)) * inverse_x
    return queue, (weight_x, scale_x, scale_x * inverse_x * logit_x / rows.width)
