"""linear_xent against the plain cross entropy, and its memory bound."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.linear_xent import linear_xent, specs
from pallas_kernels.testing import assert_close, compare, relative_rms


def loss_and_grads(x, weight, labels, **options):
    """Loss sum, number of labels, dx, dW."""

    def fn(x, weight):
        return linear_xent(x, weight, labels, **options)

    (loss, count), grads = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)(x, weight)
    return loss, count, *grads


@pytest.mark.parametrize("name", specs.CASES)
def test_values_and_gradients_equal_reference(name):
    case = specs.CASES[name]
    x, weight, labels = specs.make_inputs(case)
    errors = compare(
        lambda x, weight: linear_xent(
            x,
            weight,
            labels,
            rows_per_chunk=case.rows_per_chunk,
            vocab_per_chunk=case.vocab_per_chunk,
            **case.options,
        ),
        lambda x, weight: linear_xent(x, weight, labels, impl="ref", **case.options),
        {"x": x, "weight": weight},
    )
    assert_close(errors, specs.TOLERANCES[case.dtype])


@pytest.mark.parametrize("name", ["both", "all_ignored"])
def test_ignored_rows_may_hold_nan(name):
    case = specs.CASES[name]
    fn = jax.jit(
        lambda *a: loss_and_grads(*a, rows_per_chunk=case.rows_per_chunk, vocab_per_chunk=50)
    )
    clean, poisoned = fn(*specs.make_inputs(case)), fn(*specs.make_inputs(case, poison=jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(clean[2][: case.ignored], 0)
    assert int(clean[1]) == case.num_rows - case.ignored
    if name == "all_ignored":
        assert float(clean[0]) == 0 and not np.any(clean[3])


def test_zero_logits_cost_ln_of_the_vocabulary():
    for num_vocab, expected in [(163840, 12.006646), (129280, 11.769736)]:
        zeros = jnp.zeros((2, 1)), jnp.zeros((num_vocab, 1)), jnp.array([0, num_vocab - 1])
        loss, count = linear_xent(*zeros, vocab_per_chunk=50000)
        assert float(loss) / int(count) == pytest.approx(math.log(num_vocab), rel=1e-6)
        assert float(loss) / int(count) == pytest.approx(expected, rel=1e-6)


def test_random_head_starts_above_ln_v_by_half_the_variance():
    keys = jax.random.split(jax.random.key(0), 3)
    num_rows, width, num_vocab, std = 4000, 128, 4000, 0.1
    x = jax.random.normal(keys[0], (num_rows, width))
    x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True))
    weight = std * jax.random.normal(keys[1], (num_vocab, width))
    labels = jax.random.randint(keys[2], (num_rows,), 0, num_vocab)
    loss, count = jax.jit(linear_xent)(x, weight, labels)
    assert float(loss) / int(count) == pytest.approx(math.log(num_vocab) + width * std**2 / 2, 0.01)


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        arrays = (a.astype(jnp.float64) for a in specs.make_inputs(specs.CASES["whole"])[:2])
        x, weight = arrays
        labels = specs.make_inputs(specs.CASES["whole"])[2]
        actual = loss_and_grads(x, weight, labels, rows_per_chunk=10, vocab_per_chunk=50)
        expected = loss_and_grads(x, weight, labels, impl="ref")
        assert actual[0].dtype == jnp.float64
        for a, b in zip(actual, expected, strict=True):
            assert relative_rms(a, b) <= 1e-14


def sharded_loss(mesh, vocab_axis, options):
    """Mean loss with rows over `data`, and the vocabulary over `vocab_axis` if named."""

    def local(x, weight, labels):
        loss, count = linear_xent(x, weight, labels, vocab_axis=vocab_axis, **options)
        return jax.lax.psum(loss, "data"), jax.lax.psum(count, "data")

    fn = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"), P(vocab_axis), P("data")),
        out_specs=(P(), P()),
        check_vma=False,
    )

    def mean(x, weight, labels):
        loss, count = fn(x, weight, labels)
        return loss / count

    return mean


@pytest.mark.parametrize("vocab_axis", [None, "tensor"])
@pytest.mark.parametrize("chunks", [(None, None), (5, 7)])
def test_shards_equal_one_device(vocab_axis, chunks):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=auto)
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (24, 6))
    weight = jax.random.normal(keys[1], (40, 6))
    labels = jax.random.randint(keys[2], (24,), 0, 40).at[3:7].set(-100)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 4.0}

    def plain(x, weight, labels):
        loss, count = linear_xent(x, weight, labels, impl="ref", **options)
        return loss / count

    sizes = {"rows_per_chunk": chunks[0], "vocab_per_chunk": chunks[1]}
    sharded = sharded_loss(mesh, vocab_axis, options | sizes)
    results = [
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(x, weight, labels)
        for fn in (sharded, plain)
    ]
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative_rms(actual, expected) <= 1e-6


def test_frozen_head_costs_no_weight_gradient():
    x, weight, labels = specs.make_inputs(specs.CASES["both"])

    def dots(argnums):
        def fn(x, weight):
            return linear_xent(x, weight, labels, rows_per_chunk=128)[0]

        return str(jax.make_jaxpr(jax.grad(fn, argnums=argnums))(x, weight)).count("dot_general")

    assert (dots((0, 1)), dots(0)) == (3, 2)


def test_memory_at_full_vocabulary():
    num_vocab, num_tokens, width = 163840, 4096, 512
    shapes = [(num_tokens, width), (num_vocab, width)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    arrays.append(jax.ShapeDtypeStruct((num_tokens,), jnp.int32))

    def plain_loss(x, weight, labels):
        logits = x @ weight.T
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        valid = labels != -100
        loss = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - picked, 0)
        return jnp.sum(loss), jnp.sum(valid)

    def temp_bytes(fn):
        def mean(x, weight, labels):
            loss, count = fn(x, weight, labels)
            return loss / count

        compiled = jax.jit(jax.value_and_grad(mean, argnums=(0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain = temp_bytes(plain_loss)
    assert plain >= num_tokens * num_vocab * 4
    # nothing is taken off for the accumulator of dW: it grows in the output's own memory
    assert temp_bytes(linear_xent) <= plain / 12
    both = {"rows_per_chunk": 512, "vocab_per_chunk": 16384}
    assert temp_bytes(lambda *a: linear_xent(*a, **both)) <= plain / 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"rows_per_chunk": 0}, "rows_per_chunk=0"),
        ({"vocab_per_chunk": -2}, "vocab_per_chunk=-2"),
        ({"labels": jnp.zeros(4, jnp.int32)}, "disagree"),
        ({"weight": jnp.ones((5, 3))}, "disagree"),
    ],
)
def test_refusals(change, message):
    x, weight, labels = jnp.ones((3, 2)), jnp.ones((5, 2)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=message):
        linear_xent(**({"x": x, "weight": weight, "labels": labels} | change))
