"""linear_xent for GPUs, in Pallas' interpreter, against all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_xent import linear_xent, specs
from pallas_kernels.testing import assert_close, compare

ALL = {"label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 5.0}
CASES = {
    "one_row": specs.CASES["one_row"],
    "plain": specs.Case(num_rows=63, width=8, num_vocab=131, ignored=5),
    # two tiles of rows, three of the vocabulary, two of the width, none of them full
    "tiles": specs.Case(num_rows=130, width=70, num_vocab=600, ignored=3, options=ALL),
    "bfloat16": specs.Case(
        num_rows=130, width=32, num_vocab=257, ignored=3, options={"z_loss": 1e-3}, dtype="bfloat16"
    ),
}


def _inputs(case, poison=None):
    """As `specs.make_inputs`, without programs to compile."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((case.num_rows, case.width), np.float32)
    weight = rng.standard_normal((case.num_vocab, case.width), np.float32)
    labels = rng.integers(0, case.num_vocab, case.num_rows).astype(np.int32)
    labels[-1], labels[: case.ignored] = case.num_vocab - 1, -100
    if poison is not None:
        x[: case.ignored] = poison
    return jnp.asarray(x, case.dtype), jnp.asarray(weight, case.dtype), jnp.asarray(labels)


def _loss(case, labels, impl):
    return lambda x, weight: linear_xent(x, weight, labels, impl=impl, **case.options)[0]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_reference(name):
    case = CASES[name]
    x, weight, labels = _inputs(case)
    errors = compare(
        _loss(case, labels, "pallas_gpu"), _loss(case, labels, "ref"), {"x": x, "weight": weight}
    )
    assert_close(errors, specs.TOLERANCES[case.dtype])


def test_ignored_rows_may_hold_nan():
    case = CASES["plain"]
    grad = lambda x, weight, labels: jax.value_and_grad(  # noqa: E731
        _loss(case, labels, "pallas_gpu"), argnums=(0, 1)
    )(x, weight)
    clean = jax.jit(grad)(*_inputs(case))
    poisoned = jax.jit(grad)(*_inputs(case, poison=jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(poisoned[1][0][: case.ignored], 0)


def test_a_frozen_head_gets_no_gradient():
    """The sums of its gradient are then not even arguments of the kernel."""
    case = CASES["plain"]
    x, weight, labels = _inputs(case)
    text = str(jax.make_jaxpr(jax.grad(lambda x: _loss(case, labels, "pallas_gpu")(x, weight)))(x))
    assert "xent_grad" in text
    both = jax.make_jaxpr(jax.grad(_loss(case, labels, "pallas_gpu"), argnums=(0, 1)))(x, weight)
    assert str(both).count("f32[131,8]") > text.count("f32[131,8]")


def test_what_the_kernel_does_not_take():
    case = CASES["plain"]
    x, weight, labels = _inputs(case)
    with pytest.raises(NotImplementedError, match="split over more"):
        linear_xent(x, weight, labels, vocab_axis="v", impl="pallas_gpu")
    with pytest.raises(NotImplementedError, match="one dtype"):
        linear_xent(x.astype(jnp.bfloat16), weight, labels, impl="pallas_gpu")
