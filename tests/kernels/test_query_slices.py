"""A device that has some queries and every key: its share, by explicit offsets, adds up.

What context parallelism asks of the attention operators: outputs of the slices side by side are the
whole's, so are gradients of what is local to queries, and the gradients of keys sum to the whole's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.indexer_kl import specs as kl_specs
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.mla_attention import specs as mla_specs
from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from pallas_kernels.sparse_flash_attention import specs as sfa_specs

T = 64
OF_KEYS = ("k", "v", "latent", "k_rope", "k_idx", "kv_segment_ids")


def _mla(chosen: int):
    case = mla_specs.Case(1, T, T, 2, 16, 16, starts=(20, 41), padding=2, J=chosen)
    x = case.inputs()
    return mla_attention, x | {"kv_segment_ids": x["segment_ids"]}, ("q", "k", "v")


def _sfa():
    x = sfa_specs.Case(1, T, T, 2, 16, 16, 9, empty=2).inputs()
    return sparse_flash_attention, x, ("q_latent", "q_rope", "latent", "k_rope")


def _kl(chosen: int | None):
    case = kl_specs.Case(1, T, 2, 16, 16, 3, 16, chosen, starts=(20, 41), padding=2)
    x = kl_specs.with_sets(case, case.inputs())
    if chosen is None:
        x |= {"kv_segment_ids": x["segment_ids"]}
    return indexer_kl, x, ("q_idx", "k_idx", "w_idx")


CASES = {
    "mla": lambda: _mla(0), "mla_chosen": lambda: _mla(9), "sfa": _sfa,
    "kl": lambda: _kl(9), "kl_dense": lambda: _kl(None),
}  # fmt: skip
OFFSET = ("mla", "mla_chosen", "kl_dense")  # the others have the order in their indices


@functools.cache
def compiled(name, size, impl):
    """Values and gradients of `size` queries from an offset on, all keys, and what has gradients.

    One program serves every slice.
    """
    op, whole, wrt = CASES[name]()

    def run(x, offset, cotangent):
        options = {"scale": 0.2, "impl": impl} | ({"q_offset": offset} if name in OFFSET else {})
        rest = {key: a for key, a in x.items() if key not in wrt}

        def first(parts):
            found = op(**parts, **rest, **options)
            return found[0] if isinstance(found, tuple) else found

        out, pull = jax.vjp(first, {key: x[key] for key in wrt})
        return out, pull(cotangent.astype(out.dtype))[0]

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0}), whole, wrt


@functools.cache
def whole_of(name):
    """Output and gradients over all queries, and the cotangent."""
    op, x, _ = CASES[name]()
    found = jax.eval_shape(functools.partial(op, scale=0.2), **x)
    shape = (found[0] if isinstance(found, tuple) else found).shape
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
    return compiled(name, T, "chunked")[0](x, jnp.int32(0), cotangent), cotangent


IMPLS = [("chunked", n, 8) for n in CASES]
IMPLS += [("pallas_gpu", "kl_dense", 2)]
SLOW = [("chunked", n, s) for n in CASES for s in (2, 4)]
SLOW += [("pallas_gpu", n, s) for n in CASES for s in (2, 4, 8) if (n, s) != ("kl_dense", 2)]
SLOW += [("pallas_tpu", n, s) for n in ("mla", "mla_chosen", "kl_dense") for s in (2, 4, 8)]


@pytest.mark.parametrize(
    ("impl", "name", "slices"),
    [*IMPLS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_slices_of_queries_add_up_to_the_whole(impl, name, slices):
    (out, grads), cotangent = whole_of(name)
    size = T // slices
    run, x, wrt = compiled(name, size, impl)
    parts = []
    for start in range(0, T, size):
        local = {
            key: a if key in OF_KEYS or a is None else a[:, start : start + size]
            for key, a in x.items()
        }
        parts.append(run(local, jnp.int32(start), cotangent[:, start : start + size]))
    np.testing.assert_allclose(
        jnp.concatenate([part[0] for part in parts], axis=1), out, rtol=1e-5, atol=1e-6
    )
    for key in wrt:
        found = [part[1][key] for part in parts]
        joined = sum(found) if key in OF_KEYS else jnp.concatenate(found, axis=1)
        np.testing.assert_allclose(joined, grads[key], rtol=1e-4, atol=2e-6, err_msg=key)
