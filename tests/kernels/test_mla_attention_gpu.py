"""mla_attention for GPUs, in Pallas' interpreter: values, gradients, borders, poisoned padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import chosen, mla_attention, spans, specs
from pallas_kernels.testing import assert_close
from tests.kernels.attention_errors import TOLERANCE, errors, poisoned_padding

DEFAULT = [("odd65_packed", "bfloat16"), ("three_tiles", "float32"), ("chosen", "float32")]
RUNS = [(name, "float32") for name in specs.KERNEL_CASES] + [("later_queries", "bfloat16")]
SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in RUNS if run not in DEFAULT]


@pytest.mark.parametrize(("name", "dtype"), [*DEFAULT, *SLOW])
def test_values_and_gradients_equal_reference(name, dtype):
    case = specs.KERNEL_CASES[name]
    clean = {name: x for name, x in case.inputs(jnp.dtype(dtype)).items() if x is not None}
    kernel, ref = (
        functools.partial(mla_attention, impl=impl, **case.options())
        for impl in ("pallas_gpu", "ref")
    )
    assert_close(errors(kernel, ref, poisoned_padding(clean), clean), TOLERANCE[dtype])


def _hidden(seg_q, seg_k, offset, causal):
    same = (seg_q[:, :, None] == seg_k[:, None]) & (seg_q[:, :, None] > 0)
    past = np.arange(seg_k.shape[1]) <= np.arange(seg_q.shape[1])[:, None] + offset
    return ~(same & past if causal else same)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("by_key", [True, False])
def test_spans_have_every_visible_pair_and_full_ones_hide_none(causal, by_key):
    rng = np.random.default_rng(0)
    t, s = 4, 8
    for _ in range(8):
        seg_k = np.sort(rng.integers(0, 5, (2, 48)), axis=1)
        seg_k = seg_k if rng.random() < 0.5 else seg_k[:, ::-1]  # padding first, or last
        seg_q, offset = seg_k[:, 20:40], 20
        table = spans.spans(
            jnp.asarray(seg_q), jnp.asarray(seg_k), jnp.int32(offset), (t, s), causal, by_key
        )
        visible = ~_hidden(seg_q, seg_k, offset, causal).reshape(2, 5, t, 6, s)
        some, every = visible.any((2, 4)), visible.all((2, 4))
        if by_key:
            some, every = np.swapaxes(some, 1, 2), np.swapaxes(every, 1, 2)
        tile = np.arange(some.shape[2])
        first, end, full_first, full_end, offsets = np.moveaxis(np.asarray(table), 2, 0)[..., None]
        assert (offsets == offset).all()
        assert (some <= ((first <= tile) & (tile < end))).all()
        full = (full_first <= tile) & (tile < full_end)
        assert (full <= every).all() and (full <= ((first <= tile) & (tile < end))).all()
        # what a causal row of one document needs no mask for
        assert not every.any() or full.any()


def test_one_bit_a_pair():
    """Empty slots set no bit, the last bit of a word is its sign, a key given twice is one bit."""
    indices = jnp.array([[[31, -1, 40], [-1, 64, 99], [0, 63, 32], [1, 1, 1]]])
    words = np.asarray(chosen.pack(indices, 5, 64)).view(np.uint32)
    assert words.tolist() == [[[1 << 31, 0, 1, 2, 0], [1 << 8, 0, 1 << 31 | 1, 0, 0]]]


@pytest.mark.slow
def test_shard_map_and_vmap():
    """Over the batch, with a document border inside; two rows on each of two devices."""
    case = specs.Case(4, 20, 20, 1, 16, 16, starts=(7,))
    x = {name: a for name, a in case.inputs().items() if a is not None}
    run = lambda x: mla_attention(**x, scale=0.2, impl="pallas_gpu")[0]  # noqa: E731
    alone = jax.vmap(lambda x: run({name: a[None] for name, a in x.items()})[0])
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=auto)
    spec = jax.sharding.PartitionSpec("data")
    shared = jax.shard_map(alone, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_allclose(jax.jit(shared)(x), mla_attention(**x, scale=0.2)[0], atol=2e-6)


def test_what_the_kernel_refuses():
    q = jnp.zeros((1, 4, 2, 24))
    with pytest.raises(NotImplementedError, match="width 24 is not a multiple of 16"):
        mla_attention(q, q, q, scale=1.0, impl="pallas_gpu")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        wide = jnp.zeros((1, 4, 2, 16), jnp.float64)
        mla_attention(wide, wide, wide, scale=1.0, impl="pallas_gpu")
