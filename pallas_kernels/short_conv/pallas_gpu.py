"""short_conv with its gradient as one kernel; the forward is the one pass that XLA makes of it.

A program walks along some positions of some channels and keeps the last K of them in registers, so
that x and dy are read once, dx is written once, and nothing in float32 reaches memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.short_conv import chunked
from pallas_kernels.short_conv.tiles import Tiles, tiles_for

_MAX_TAPS = 8


def short_conv(x, taps, *, segment_ids, initial_state, activation):
    """`api.short_conv` with every default filled in."""
    num_taps, length = taps.shape[0], x.shape[1]
    if any(a.dtype == jnp.float64 for a in (x, taps)):
        raise NotImplementedError("float64 has no kernel")
    if initial_state is not None:
        raise NotImplementedError("the kernel starts every row at its first position")
    if not 2 <= num_taps <= _MAX_TAPS or length < num_taps:
        raise NotImplementedError(
            f"{num_taps} taps over {length} positions: the kernel takes 2 to {_MAX_TAPS} over as "
            "many positions or more"
        )
    if segment_ids is None:
        segment_ids = jnp.ones(x.shape[:2], jnp.int32)
    return _conv(activation, x, taps, segment_ids.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(activation, x, taps, segment_ids):
    return chunked.short_conv(
        x, taps, segment_ids=segment_ids, initial_state=None, activation=activation
    )


def _conv_fwd(activation, *args):
    return _conv(activation, *args), args


def _conv_bwd(activation, args, cotangents):
    x_BTX, taps_KX, segment_ids_BT = args
    dy_BTX, d_state_BKX = cotangents
    dx_BTX, d_taps_KX = _gradient(activation, x_BTX, taps_KX, segment_ids_BT, dy_BTX)
    # the final state is the last K - 1 inputs of the last document
    last = slice(x_BTX.shape[1] - taps_KX.shape[0] + 1, None)
    same_BK = (segment_ids_BT[:, last] == segment_ids_BT[:, -1:]) & (segment_ids_BT[:, last] != 0)
    d_state_BKX = jnp.where(same_BK[..., None], d_state_BKX, jnp.zeros((), d_state_BKX.dtype))
    return dx_BTX.at[:, last].add(d_state_BKX.astype(dx_BTX.dtype)), d_taps_KX, None


_conv.defvjp(_conv_fwd, _conv_bwd)


def _gradient(activation, x_BTX, taps_KX, segment_ids_BT, dy_BTX):
    (batch, length, channels), num_taps = x_BTX.shape, taps_KX.shape[0]
    walk = _Walk(tiles_for(length, channels), length, channels, num_taps, activation)
    chunks, parts = walk.grid
    given = (
        x_BTX.reshape(-1, channels), dy_BTX.reshape(-1, channels), segment_ids_BT.reshape(-1),
        taps_KX.astype(jnp.float32),
    )  # fmt: skip
    out = [
        jax.ShapeDtypeStruct(given[0].shape, x_BTX.dtype),
        jax.ShapeDtypeStruct((batch * chunks * num_taps, channels), jnp.float32),
    ]
    whole = lambda a: pl.BlockSpec(a.shape, lambda *_: (0,) * len(a.shape))  # noqa: E731
    dx_RX, d_taps_GX = _gpu.call(
        functools.partial(_body, walk), name="short_conv_grad",
        # a GPU counts the first axis up first: programs side by side have channels side by side
        grid=(parts, chunks, batch),
        in_specs=[whole(a) for a in given], out_specs=[whole(a) for a in out], out_shape=out,
        warps=walk.tiles.warps,
    )(*given)  # fmt: skip
    d_taps_KX = d_taps_GX.reshape(-1, num_taps, channels).sum(0)
    return dx_RX.reshape(x_BTX.shape), d_taps_KX.astype(taps_KX.dtype)


class _Walk(NamedTuple):
    """Sizes."""

    tiles: Tiles
    length: int
    channels: int
    num_taps: int
    activation: str | None

    @property
    def grid(self):
        return pl.cdiv(self.length, self.tiles.positions), pl.cdiv(
            self.channels, self.tiles.channels
        )

    def d_sum(self, total, dy):
        """Gradient of the sum before the activation."""
        if self.activation is None:
            return dy
        gate = jax.nn.sigmoid(total)
        return dy * gate * (1 + total * (1 - gate))


def _body(walk, x_ref, dy_ref, segments_ref, taps_ref, dx_ref, d_taps_ref):
    part, chunk, row = (pl.program_id(axis) for axis in range(3))
    tiles, K = walk.tiles, walk.num_taps
    columns = pl.ds(part * tiles.channels, tiles.channels)
    inside = (part * tiles.channels + jnp.arange(tiles.channels, dtype=jnp.int32)) < walk.channels
    begin = chunk * tiles.positions
    end = jnp.minimum(begin + tiles.positions, walk.length)
    taps = [_gpu.load(taps_ref.at[jnp.int32(j), columns], inside) for j in range(K)]
    zeros = jnp.zeros(tiles.channels, jnp.float32)

    def fetch(t):
        """x, dy and the document of a position; where there is none, 0 and that of the nearest."""
        there = (t >= 0) & (t < walk.length)
        at = row * walk.length + jnp.clip(t, 0, walk.length - 1)
        x = _gpu.load(x_ref.at[at, columns], inside & there)
        dy = _gpu.load(dy_ref.at[at, columns], inside & there & (t >= begin))
        return x, dy, segments_ref[at]

    def step(t, carry):
        queue, past_x, past_d, past_segment, d_taps = carry
        x, dy, segment = queue[0]
        # index k: k positions ago
        real = segment != 0
        xs = (jnp.where(real, x.astype(jnp.float32), 0), *past_x)
        segments = (segment, *past_segment)
        xs_seen = [jnp.where(segments[k] == segment, xs[k], 0) for k in range(K)]
        total = sum(taps[K - 1 - k] * xs_seen[k] for k in range(K))
        # a position of padding has no gradient: it meets only others of padding
        ds = (walk.d_sum(total, jnp.where(real, dy.astype(jnp.float32), 0)), *past_d)
        # positions past the end are another program's, but reach back into this one's
        own = jnp.where(t < end, ds[0], 0)
        d_taps = tuple(d_taps[j] + own * xs_seen[K - 1 - j] for j in range(K))
        # what K - 1 positions ago is seen by
        since = segments[K - 1]
        terms = (jnp.where(segments[k] == since, taps[k] * ds[k], 0) for k in range(K))
        dx = sum(terms, start=zeros)
        target = t - (K - 1)
        ours = inside & (target >= begin) & (target < end)
        at = row * walk.length + jnp.clip(target, 0, walk.length - 1)
        _gpu.store(dx_ref.at[at, columns], dx, ours)
        queue = (*queue[1:], fetch(t + tiles.ahead))
        return queue, xs[:-1], ds[:-1], segments[:-1], d_taps

    first = begin - (K - 1)
    queue = tuple(fetch(first + i) for i in range(tiles.ahead))
    init = (queue, (zeros,) * (K - 1), (zeros,) * (K - 1), (jnp.int32(0),) * (K - 1), (zeros,) * K)
    d_taps = lax.fori_loop(first, end + K - 1, step, init)[-1]
    for j in range(K):
        at = (row * walk.grid[0] + chunk) * K + j
        _gpu.store(d_taps_ref.at[at, columns], d_taps[j], inside)
