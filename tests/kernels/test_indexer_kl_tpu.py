"""The indexer loss's TPU kernels in the interpreter: the dense stage, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_kl import indexer_kl, specs
from pallas_kernels.testing import assert_close, compare

INDEX = ("q_idx", "k_idx", "w_idx")
TPU = functools.partial(indexer_kl, impl="pallas_tpu")
REF = functools.partial(indexer_kl, impl="ref")
CASES = specs.CASES | {
    # several tiles of queries and of keys
    "odd257_dense": specs.Case(1, 257, 2, 16, 0, 4, 16, None, starts=(100,), padding=3)
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("one_dense", "float32", marks=pytest.mark.slow),
        ("odd65_dense", "float32"),
        ("odd257_dense", "bfloat16"),
    ],
)
def test_values_and_gradients_equal_reference(name, dtype):
    case = CASES[name]
    x = specs.with_sets(case, case.inputs(jnp.dtype(dtype)))
    errors = compare(TPU, REF, x, wrt=INDEX, floor=1e-3, **case.options())
    assert_close(errors, specs.TOLERANCE[dtype])


def test_what_no_query_sees_may_hold_anything():
    """NaN in padding's queries and keys."""
    case = CASES["odd65_dense"]
    x = specs.with_sets(case, case.inputs())

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(x):
        rest = {name: a for name, a in x.items() if name not in INDEX}
        loss = lambda index: TPU(**index, **rest, **case.options()).sum()  # noqa: E731
        return jax.value_and_grad(loss)({name: x[name] for name in INDEX})

    kl, grads = both(x)
    lost = slice(case.T - case.padding, None)
    poisoned = {n: a.at[:, lost].set(jnp.nan) for n, a in x.items() if a.dtype == jnp.float32}
    poisoned_kl, found = both(x | poisoned)
    assert poisoned_kl == kl
    for name in INDEX:
        np.testing.assert_array_equal(found[name], grads[name])
        np.testing.assert_array_equal(found[name][:, lost], 0)


def test_the_sparse_stage_is_refused():
    case = specs.CASES["odd63"]
    x = case.inputs() | {"lse": jnp.zeros((case.B, case.T, case.N))}
    indices = jnp.zeros((case.B, case.T, 3), jnp.int32)
    with pytest.raises(NotImplementedError, match="one by one"):
        TPU(**x, indices=indices, **case.options())
