"""grouped_matmul against the loop over groups, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, mxfp4, specs
from pallas_kernels.grouped_matmul.activation import gated
from pallas_kernels.testing import assert_close, compare, relative_rms


def run(rows, weights, group_sizes, *, scales=None, a=None, b=None, **options):
    """grouped_matmul with its arrays by name."""
    lora = None if a is None else (a, b)
    options = {"scales": scales, "lora": lora, "lora_scale": 0.7} | options
    return grouped_matmul(rows, weights, group_sizes, **options)


@pytest.mark.parametrize("name", specs.CASES)
def test_values_and_gradients_equal_reference(name):
    case = specs.CASES[name]
    errors = compare(
        functools.partial(run, activation=case.activation),
        functools.partial(run, activation=case.activation, impl="ref"),
        specs.make_all(case),
        floor=1e-3 if name == "nothing" else 1e-30,
    )
    assert_close(errors, specs.TOLERANCES[case.dtype])


@pytest.mark.parametrize("seed", range(4))
def test_equals_loop_over_experts_in_numpy(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(200, rng.dirichlet(np.full(6, 0.3)))
    rows, weights = rng.normal(size=(210, 9)), rng.normal(size=(6, 9, 4))
    expected, start = np.zeros((210, 4)), 0
    for e, size in enumerate(sizes):
        expected[start : start + size] = rows[start : start + size] @ weights[e]
        start += size
    with jax.enable_x64(True):
        out = jax.jit(grouped_matmul)(jnp.array(rows), jnp.array(weights), jnp.array(sizes))
        assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tail", "situ", "nothing"])
def test_rows_past_the_last_group_do_not_leak(name):
    case = specs.CASES[name]
    num_real = sum(case.group_sizes)

    @jax.jit
    def value_and_grads(rows, weights, sizes, cotangent):
        def fn(rows, weights):
            return grouped_matmul(rows, weights, sizes, activation=case.activation)

        out, pullback = jax.vjp(fn, rows, weights)
        return out, *pullback(cotangent)

    clean = specs.make_inputs(case)
    cotangent = jnp.cos(jnp.arange(case.num_rows))[:, None]
    cotangent *= jnp.ones(case.f_dim // (2 if case.activation else 1))
    expected = value_and_grads(*clean, cotangent)
    poison = value_and_grads(
        *specs.make_inputs(case, tail=jnp.nan), cotangent.at[num_real:].set(jnp.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, poison, expected)
    out, d_rows, d_weights = poison
    np.testing.assert_array_equal(out[num_real:], 0)
    np.testing.assert_array_equal(d_rows[num_real:], 0)
    empty = np.array(case.group_sizes) == 0
    np.testing.assert_array_equal(d_weights[empty], 0)
    assert name == "nothing" or np.abs(d_weights[~empty]).min() > 0


def test_situ_golden_numbers():
    pairs = jnp.array([[1.0, 1.0], [2.0, -3.0], [-1.0, 2.0]])
    expected = [0.715817828, -4.861066551, -0.525828896]
    np.testing.assert_allclose(gated(pairs, "situ", (4.0, 25.0))[:, 0], expected, rtol=3e-7)
    wide = gated(pairs, "situ", (1e4, 1e4))
    np.testing.assert_allclose(wide, gated(pairs, "swiglu", (4.0, 25.0)), rtol=1e-6)


def test_runs_inside_shard_map_with_gradients():
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    rows = jnp.array(rng.normal(size=(8 * 20, 6)), jnp.float32)
    weights = jnp.array(rng.normal(size=(16, 6, 8)), jnp.float32)
    sizes = jnp.array(rng.integers(0, 11, 16), jnp.int32)
    spec = jax.sharding.PartitionSpec("expert")

    def local(rows, weights, sizes):
        return grouped_matmul(rows, weights, sizes, activation="swiglu")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def plain(rows, weights, sizes):
        parts = rows.reshape(8, 20, 6), weights.reshape(8, 2, 6, 8), sizes.reshape(8, 2)
        return jnp.concatenate(
            [
                grouped_matmul(*(p[d] for p in parts), activation="swiglu", impl="ref")
                for d in range(8)
            ]
        )

    def grads(fn):
        return jax.jit(jax.grad(lambda r, w: jnp.sum(jnp.sin(fn(r, w, sizes))), argnums=(0, 1)))

    for actual, expected in zip(
        grads(sharded)(rows, weights), grads(plain)(rows, weights), strict=True
    ):
        assert relative_rms(actual, expected) <= 1e-6


def test_memory_is_a_tenth_of_ragged_dot():
    shapes = [(4096, 256), (64, 256, 256)]
    rows, weights = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)

    def temp_bytes(fn):
        compiled = jax.jit(fn).lower(rows, weights, sizes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def gradient(fn):
        return jax.grad(lambda r, w, s: jnp.sum(fn(r, w, s) ** 2), argnums=(0, 1))

    ragged = jax.lax.ragged_dot
    assert temp_bytes(grouped_matmul) <= temp_bytes(ragged) / 10
    assert temp_bytes(gradient(grouped_matmul)) <= temp_bytes(gradient(ragged)) / 6


def bits_of(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_under_every_scale_is_exact(dtype):
    """Against the product in NumPy: -0, subnormals, infinities and the NaN of scale 255."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
    values = np.concatenate([e2m1, -e2m1])[:, None]
    factors = np.append(2.0 ** (np.arange(255) - 127), np.nan)
    with np.errstate(over="ignore"):
        want = (values * factors).astype(np.float32).astype(dtype)
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 256, 1)
    low_first = codes[0::2] | codes[1::2] << 4
    packed = np.concatenate([low_first, low_first])  # 32 codes: all of them twice
    scales = np.arange(256, dtype=np.uint8)[None]
    got = jax.jit(mxfp4.decode, static_argnums=2)(packed, scales, dtype)
    number = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(np.float32(got)), np.tile(~number, (2, 1)))
    for half in (got[:16], got[16:]):
        np.testing.assert_array_equal(bits_of(half)[number], bits_of(want)[number])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_give_the_bits_of_unpacked_ones(dtype):
    case = specs.CASES["packed_situ_lora"]
    inputs = specs.make_all(case)
    for name in ("rows", "a", "b"):
        inputs[name] = inputs[name].astype(dtype)
    scales = inputs.pop("scales").at[0, 0, 0].set(0)
    sizes, packed = inputs.pop("group_sizes"), inputs.pop("weights")
    plain = mxfp4.decode(packed, scales, jnp.dtype(dtype))

    @jax.jit
    def both(packed, plain, inputs):
        def of(weights, scales):
            fn = lambda inputs: run(  # noqa: E731
                weights=weights, scales=scales, group_sizes=sizes, activation="situ", **inputs
            )
            out, pull = jax.vjp(fn, inputs)
            return out, pull(jnp.cos(out))

        return of(packed, scales), of(plain, None)

    got, want = both(packed, plain, inputs)
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(bits_of(g), bits_of(w)), got, want)


def test_encoding_takes_the_nearest_code():
    values = jnp.array(np.random.default_rng(0).standard_normal((2, 64, 9)) * 0.02, jnp.float32)
    values = values.at[0, :32, 0].set(0)
    packed, scales = jax.jit(mxfp4.encode)(values)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    blocks = np.asarray(values).reshape(2, 2, 32, 9)
    largest = np.abs(blocks).max(2)
    exponents = np.floor(np.log2(largest, where=largest > 0, out=np.full_like(largest, 2)))
    np.testing.assert_array_equal(scales, exponents + 125)
    scaled = blocks / 2.0 ** (exponents - 2)[:, :, None]
    nearest = np.abs(np.abs(scaled)[..., None] - codes).min(-1)
    got = np.asarray(mxfp4.decode(packed, scales, jnp.float32)).reshape(blocks.shape)
    np.testing.assert_allclose(
        np.abs(got - blocks) / 2.0 ** (exponents - 2)[:, :, None], nearest, atol=1e-6
    )
    np.testing.assert_array_equal(np.signbit(got), np.signbit(blocks))


def test_unpacked_experts_never_exist_at_once():
    """Temporaries of a pass with gradients stay under two experts wide; all are 32 of them."""
    num_experts, k_dim, f_dim, num_rows, rank = 32, 256, 512, 64, 4
    one_expert = k_dim * f_dim * 4
    shaped = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    args = {
        "weights": shaped(num_experts, k_dim // 2, f_dim, dtype="uint8"),
        "scales": shaped(num_experts, k_dim // 32, f_dim, dtype="uint8"),
        "group_sizes": shaped(num_experts, dtype="int32"),
    }
    wanted = {
        "rows": shaped(num_rows, k_dim),
        "a": shaped(k_dim, rank),
        "b": shaped(num_experts, rank, f_dim),
    }

    def step(wanted, args):
        return jax.grad(lambda w: jnp.sum(run(activation="swiglu", **w, **args) ** 2))(wanted)

    compiled = jax.jit(step).lower(wanted, args).compile()
    # Beside them the rows' arrays, [64, 512] in float32 at most.
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * one_expert


def looped(fn):
    """Under remat, inside a scan of two steps."""

    def scanned(rows, weights, sizes):
        body = jax.checkpoint(lambda x, _: (fn(x, weights, sizes), None))
        return jax.lax.scan(body, rows, None, length=2)[0]

    return scanned


@pytest.mark.parametrize("wrap", [lambda fn: fn, looped])
def test_frozen_weights_cost_no_weight_gradient(wrap):
    rows, sizes = jnp.ones((90, 16)), jnp.array([1, 63, 0, 7, 9], jnp.int32)
    weights = jnp.ones((5, 16, 16))
    fn = wrap(lambda *args: grouped_matmul(*args))

    def text(argnums):
        grad = jax.grad(lambda r, w: jnp.sum(fn(r, w, sizes) ** 2), argnums)
        return str(jax.make_jaxpr(grad)(rows, weights))

    # Before any compiler removes it: products [K, rows] x [rows, F], and an array to put them in.
    weight_product, buffer = "dimension_numbers=(([0], [0])", "dynamic_update_slice"
    assert weight_product in text((0, 1)) and weight_product not in text(0)
    assert text(0).count(buffer) < text((0, 1)).count(buffer)


def test_what_is_not_differentiated_has_no_gradient():
    """Each choice of what is wanted gives the values that all give together."""
    inputs = specs.make_all(specs.CASES["lora"])
    sizes, names = inputs.pop("group_sizes"), ("rows", "weights", "a", "b")

    def grads(wanted):
        fixed = {name: inputs[name] for name in names if name not in wanted}
        of = lambda chosen: jnp.sum(jnp.sin(run(group_sizes=sizes, **chosen, **fixed)))  # noqa: E731
        return jax.jit(jax.grad(of))({name: inputs[name] for name in wanted})

    whole = grads(names)
    for wanted in (("a",), ("b",), ("rows", "a"), ("weights", "b"), ("rows", "weights")):
        for name, grad in grads(wanted).items():
            np.testing.assert_array_equal(grad, whole[name])


def test_mapped_over_a_batch():
    case = specs.CASES["packed_swiglu_shared_a"]
    many = [specs.make_all(case, seed) for seed in (0, 3)]
    fixed = ("weights", "scales", "group_sizes")

    def step(inputs):
        of = lambda w: jnp.sum(run(activation="swiglu", **w, **rest) ** 2)  # noqa: E731
        rest = {name: inputs[name] for name in fixed}
        return jax.grad(of)({name: inputs[name] for name in ("rows", "a", "b")})

    got = jax.jit(jax.vmap(step))(jax.tree.map(lambda *x: jnp.stack(x), *many))
    for i, inputs in enumerate(many):
        for name, grad in jax.jit(step)(inputs).items():
            assert relative_rms(got[name][i], grad) <= 1e-6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scales": jnp.ones((2, 1, 6), "uint8")}, ValueError, "give uint8"),
        ({"weights": jnp.ones((2, 2, 6), "uint8"), "scales": jnp.ones((2, 1, 6), "uint8")},
         ValueError, "K/32"),
        ({"lora": (jnp.ones((3, 2)), jnp.ones((2, 2, 6)))}, ValueError, "do not fit"),
        ({"lora": (jnp.ones((4, 2)), jnp.ones((2, 3, 6)))}, ValueError, "do not fit"),
        ({"activation": "gelu"}, ValueError, "situ, swiglu"),
        ({"weights": jnp.ones((2, 4, 3)), "activation": "situ"}, ValueError, "halve"),
        ({"weights": jnp.ones((3, 4, 6))}, ValueError, "disagree"),
        ({"weights": jnp.ones((2, 5, 6))}, ValueError, "disagree"),
    ],
)  # fmt: skip
def test_refusals(change, error, message):
    rows, sizes = jnp.ones((3, 4)), jnp.array([1, 2])
    arguments = {"rows": rows, "weights": jnp.ones((2, 4, 6)), "group_sizes": sizes} | change
    with pytest.raises(error, match=message):
        grouped_matmul(**arguments)
