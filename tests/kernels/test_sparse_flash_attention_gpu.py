"""sparse_flash_attention for GPUs, in Pallas' interpreter: values, gradients, slots, poison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_flash_attention import sparse_flash_attention, specs
from pallas_kernels.testing import assert_close, output_and_vjp
from tests.kernels.attention_errors import TOLERANCE, errors

DEFAULT = [("heads", "float32"), ("later_queries", "bfloat16")]
RUNS = [(name, "float32") for name in specs.KERNEL_CASES] + [("heads", "bfloat16")]
SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in RUNS if run not in DEFAULT]


def poisoned(inputs):
    """The inputs with NaN in every row that no query chose, and empty slots between others."""
    chosen = np.zeros(inputs["latent"].shape[:2], bool)
    for b, row in enumerate(np.asarray(inputs["indices"])):
        chosen[b, row[row >= 0]] = True
    rows = {
        name: jnp.where(chosen[..., None], inputs[name], jnp.nan) for name in ("latent", "k_rope")
    }
    empty = jnp.full((*inputs["indices"].shape[:2], 1), -1, jnp.int32)
    first, rest = jnp.split(inputs["indices"], [1], axis=2)
    return inputs | rows | {"indices": jnp.concatenate([empty, first, empty, empty, rest], axis=2)}


def errors_of(inputs, clean, **options):
    kernel = functools.partial(sparse_flash_attention, impl="pallas_gpu", **options)
    ref = functools.partial(sparse_flash_attention, impl="ref", scale=options["scale"])
    return errors(kernel, ref, inputs, clean)


@pytest.mark.parametrize(("name", "dtype"), [*DEFAULT, *SLOW])
def test_values_and_gradients_equal_reference(name, dtype):
    case = specs.KERNEL_CASES[name]
    clean = case.inputs(jnp.dtype(dtype))
    assert_close(errors_of(poisoned(clean), clean, **case.options()), TOLERANCE[dtype])


def test_deterministic_gradients_have_no_atomic_sum_and_equal_the_others():
    case = specs.KERNEL_CASES["more_than_all"]
    inputs = case.inputs()
    errors = errors_of(inputs, inputs, **case.options(), deterministic=True)
    assert_close(errors, TOLERANCE["float32"])

    def traced(deterministic):
        def loss(latent):
            return sparse_flash_attention(
                **(inputs | {"latent": latent}), **case.options(), impl="pallas_gpu",
                deterministic=deterministic,
            )[0].sum()  # fmt: skip

        return str(jax.make_jaxpr(jax.grad(loss))(inputs["latent"]))

    assert "sparse_flash_attention_grad" in traced(False)
    assert "sparse_flash_attention_grad" not in traced(True)


@pytest.mark.slow
def test_no_key_at_all():
    case = specs.KERNEL_CASES["one"]
    inputs = case.inputs() | {"indices": jnp.full((2, 1, 1), -1, jnp.int32)}
    outputs, grads = output_and_vjp(
        functools.partial(sparse_flash_attention, impl="pallas_gpu"), inputs, **case.options()
    )
    assert (outputs[0] == 0).all() and (outputs[1] == 1e30).all()
    assert all((grad == 0).all() for grad in grads.values())


def test_what_the_kernel_refuses():
    for heads, width, reason in ((2, 24, "latent width 24 is no power"), (129, 16, "129 heads")):
        q, latent = jnp.zeros((1, 3, heads, width)), jnp.zeros((1, 3, width))
        with pytest.raises(NotImplementedError, match=reason):
            sparse_flash_attention(
                q, q[..., :16], latent, latent[..., :16], jnp.zeros((1, 3, 2), jnp.int32),
                scale=1.0, impl="pallas_gpu",
            )  # fmt: skip
