"""Kimi Delta Attention on TPUs: one kernel forwards, one backwards, from what a layer has.

The grid is (row, value head, chunks); chunks run in order, the state stays in on-chip memory.
Kept for the gradient: the inputs, and of each chunk the state at its start and its two triangles;
the rest is computed again. README.md has the maths. Checked in the interpreter and compiled for
absent chips; not measured on a TPU.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _tpu
from pallas_kernels.kda import composed
from pallas_kernels.kda.pallas_tpu_body import Grads, Inputs, Kept, Sizes, backward, forward

# Chunks a step at most: a step costs some 300 cycles beside them. And bytes of an input's block:
# VMEM, 16 MiB, holds twice some twenty blocks. K3's heads take half of this with 8 chunks of 64.
_ROWS, _BLOCK_BYTES = 8, 1 << 18


def kda(q, k, v, log_decay, beta, *, segment_ids, initial_state, scale, chunk):
    """`api.kda` with every default filled in."""
    options = {"scale": scale, "chunk": chunk, "raw": False, "lower_bound": None}
    return _run(q, k, v, log_decay, beta, None, segment_ids, initial_state, v.dtype, options)


def kda_fused(
    q, k, v, gate, beta_logits, a_log, dt_bias, *, lower_bound, segment_ids, initial_state, scale,
    chunk, return_transition,
):  # fmt: skip
    """`api.kda_fused` with every default filled in."""
    rate_NH = jnp.broadcast_to(jnp.exp(a_log.astype(jnp.float32))[:, None], dt_bias.shape)
    head_N2H = jnp.stack([dt_bias.astype(jnp.float32), rate_NH], axis=1)
    options = {"scale": scale, "chunk": chunk, "raw": True, "lower_bound": lower_bound}

    def run(values, entry, out_dtype):
        inputs = (q, k, values, gate, beta_logits, head_N2H, segment_ids)
        return _run(*inputs, entry, out_dtype, options)

    if not return_transition:
        return run(v, initial_state, v.dtype)
    # 0 and 1 are exact in any dtype; the output is not rounded before it meets the entry state
    wide = functools.partial(run, out_dtype=jnp.float32)
    return composed.with_transition(wide, v, q.shape[-1], v.dtype, initial_state)


def _run(q, k, v, gate, beta, head_N2H, segment_ids, initial_state, out_dtype, options):
    _refuse(q, k, v, gate, beta, options["chunk"])
    B, T, Nv, h = v.shape
    N, H = q.shape[2:]
    chunk = max(16, min(options["chunk"], 1 << (T - 1).bit_length()))  # a short row has no long one
    chunks = -(-T // chunk)
    chunk_bytes = chunk * max(H, h) * v.dtype.itemsize
    steps = -(-chunks // max(1, min(_ROWS, _BLOCK_BYTES // chunk_bytes)))
    rows = -(-chunks // steps)
    sizes = Sizes(
        chunk, rows, steps, Nv // N, options["scale"], options["raw"],
        options["lower_bound"], v.dtype, out_dtype,
    )  # fmt: skip
    if initial_state is None:
        initial_state = jnp.zeros((B, Nv, H, h), jnp.float32)
    q, k, flat_v, gate = (_flat(x, steps * rows * chunk) for x in (q, k, v, gate))
    inputs = Inputs(
        q, k, flat_v, gate, _by_step(jnp.swapaxes(beta.astype(jnp.float32), 1, 2), sizes),
        head_N2H, document_codes(segment_ids, B, T, sizes),
    )  # fmt: skip
    out, final = _kda(sizes, inputs, jnp.swapaxes(initial_state.astype(jnp.float32), 2, 3))
    return out[:, :T].reshape(v.shape), jnp.swapaxes(final, 2, 3)


def _refuse(q, k, v, gate, beta, chunk) -> None:
    """Raises NotImplementedError where the kernels cannot take the arguments."""
    if q.dtype not in (jnp.bfloat16, jnp.float32) or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} are not all bfloat16 or all float32"
        )
    if any(x.dtype.itemsize > 4 for x in (gate, beta)):
        raise NotImplementedError(f"gate of {gate.dtype} or beta of {beta.dtype} is too wide")
    if not 16 <= chunk <= 128:
        raise NotImplementedError(f"chunk={chunk} is not 16, 32, 64 or 128")
    widths = (q.shape[-1], v.shape[-1])
    if not _tpu.interpreted() and any(width % 128 for width in widths):
        raise NotImplementedError(f"head widths {widths} are not multiples of 128")


def _flat(x_BTNH, length):
    """[B, length, N H]: a head is a block of lanes, and nothing needs to be transposed."""
    x = x_BTNH.reshape(*x_BTNH.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)))


def _by_step(x_T, sizes: Sizes):
    """[..., T] -> [..., steps, rows, c], zeros behind the end."""
    shape = (sizes.steps, sizes.rows, sizes.chunk)
    behind = math.prod(shape) - x_T.shape[-1]
    x = jnp.pad(x_T, ((0, 0),) * (x_T.ndim - 1) + ((0, behind),))
    return x.reshape(*x.shape[:-1], *shape)


def document_codes(segment_ids, B, T, sizes: Sizes):
    """How positions belong to documents, [B, steps, rows, c] float32; None if all are of one.

    The size of a code tells documents of a chunk apart and is 1 for the one that began before the
    chunk; a code below 0 is padding. Positions after the end of the row are padding of its last
    document, so that the state at the end is that of the last position.
    """
    if segment_ids is None:
        if T == sizes.steps * sizes.rows * sizes.chunk:
            return None
        segment_ids = jnp.ones((B, T), jnp.int32)
    real = segment_ids != 0
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts, real = _by_step(starts, sizes), _by_step(real, sizes)
    size = 1 + lax.cumsum(starts.astype(jnp.float32), axis=3)
    return jnp.where(real, size, -size)


def _specs(inputs: Inputs, sizes: Sizes, H: int, h: int, at):
    """Blocks of `inputs`, of one state a head, and of what is kept of each chunk.

    `at` tells which part of a row a step has.
    """
    c, rows, group = sizes.chunk, sizes.rows, sizes.group
    key = pl.BlockSpec((1, rows * c, H), lambda b, n, i: (b, at(i), lax.div(n, group)))
    specs = Inputs(
        key, key,
        pl.BlockSpec((1, rows * c, h), lambda b, n, i: (b, at(i), n)),
        pl.BlockSpec((1, rows * c, H), lambda b, n, i: (b, at(i), n)),
        pl.BlockSpec((1, 1, 1, rows, c), lambda b, n, i: (b, n, at(i), 0, 0)),
        pl.BlockSpec((1, 2, H), lambda b, n, i: (n, 0, 0)),
        pl.BlockSpec((1, 1, rows, c), lambda b, n, i: (b, at(i), 0, 0)),
    )  # fmt: skip
    pairs = zip(specs, inputs, strict=True)
    specs = Inputs(*(None if x is None else spec for spec, x in pairs))
    state = pl.BlockSpec((1, 1, h, H), lambda b, n, i: (b, n, 0, 0))

    def of_chunk(*shape):
        return pl.BlockSpec((1, 1, rows, *shape), lambda b, n, i: (b, n, at(i), 0, 0))

    return specs, state, Kept(of_chunk(h, H), of_chunk(c, 2 * c))


def _present(items):
    return [x for x in items if x is not None]


def _named(like, refs):
    """The next references by name, None where `like` is."""
    return type(like)(*(None if x is None else next(refs) for x in like))


def _forward(sizes: Sizes, keep: bool, inputs: Inputs, initial_BNhH):
    B, Nv, h, H = initial_BNhH.shape
    c, chunks = sizes.chunk, sizes.steps * sizes.rows
    specs, state, kept = _specs(inputs, sizes, H, h, lambda i: i)

    def body(*refs):
        names = iter(refs)
        read = _named(inputs, names)
        initial, out, final = (next(names) for _ in range(3))
        forward(read, initial, out, final, Kept(*names) if keep else None, sizes)

    shapes = [
        jax.ShapeDtypeStruct(inputs.v.shape, sizes.out_dtype),
        jax.ShapeDtypeStruct(initial_BNhH.shape, jnp.float32),
    ]
    out_specs = [specs.v, state]
    if keep:
        for size in ((h, H), (c, 2 * c)):
            shapes.append(jax.ShapeDtypeStruct((B, Nv, chunks, *size), sizes.dtype))
        out_specs += kept
    return _tpu.call(
        body, name="kda_forward", grid=(B, Nv, sizes.steps), parallel=2,
        in_specs=[*_present(specs), state], out_specs=out_specs, out_shape=shapes,
    )(*_present(inputs), initial_BNhH)  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(sizes: Sizes, inputs: Inputs, initial_BNhH):
    return tuple(_forward(sizes, False, inputs, initial_BNhH))


def _kda_fwd(sizes, inputs, initial_BNhH):
    out, final, *kept = _forward(sizes, True, inputs, initial_BNhH)
    return (out, final), (inputs, Kept(*kept))


def _kda_bwd(sizes: Sizes, residuals, cotangents):
    inputs, kept = residuals
    B, Nv, _, h, H = kept.entry.shape
    specs, state, kept_specs = _specs(inputs, sizes, H, h, lambda i: sizes.steps - 1 - i)
    # of keys one a value head, in float32 where they are yet to be summed
    d_key = specs.q if sizes.group == 1 else specs.gate
    key_dtype = inputs.q.dtype if sizes.group == 1 else jnp.float32
    d_head = pl.BlockSpec((1, 1, 2, H), lambda b, n, i: (b, n, 0, 0)) if sizes.raw else None
    shape = jax.ShapeDtypeStruct
    d_key_shape = shape(inputs.gate.shape, key_dtype)
    d_v, d_gate, d_beta = (shape(x.shape, x.dtype) for x in (inputs.v, inputs.gate, inputs.beta))
    shapes = Grads(
        d_key_shape, d_key_shape, d_v, d_gate, d_beta,
        shape((B, Nv, 2, H), jnp.float32) if sizes.raw else None,
        shape((B, Nv, h, H), jnp.float32),
    )  # fmt: skip

    def body(*refs):
        names = iter(refs)
        read = _named(inputs, names)
        saved, d_out, d_final = _named(kept, names), next(names), next(names)
        backward(read, saved, d_out, d_final, _named(shapes, names), sizes)

    out_specs = [d_key, d_key, specs.v, specs.gate, specs.beta, d_head, state]
    grads = _tpu.call(
        body, name="kda_backward", grid=(B, Nv, sizes.steps), parallel=2,
        in_specs=[*_present(specs), *kept_specs, specs.v, state],
        out_specs=_present(out_specs), out_shape=_present(shapes),
    )(*_present(inputs), *kept, *cotangents)  # fmt: skip
    d = _named(shapes, iter(grads))
    dq, dk = (_group_sum(x, y, H, sizes.group) for x, y in ((d.q, inputs.q), (d.k, inputs.k)))
    head = None if d.head is None else jnp.sum(d.head, axis=0)
    return Inputs(dq, dk, d.v, d.gate, d.beta, head, None), d.initial


_kda.defvjp(_kda_fwd, _kda_bwd)


def _group_sum(d, x, H, group):
    """Sum over the value heads that share a key head."""
    if group == 1:
        return d
    return d.reshape(*d.shape[:2], -1, group, H).sum(3).reshape(x.shape).astype(x.dtype)
