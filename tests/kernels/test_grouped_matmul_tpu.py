"""grouped_matmul's kernels for TPUs, in the interpreter, against the loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choose
from pallas_kernels.grouped_matmul import grouped_matmul, pallas_tpu_rows, tiles, worklist
from pallas_kernels.testing import relative_rms
from tests.kernels import grouped_kernels

QUICK = ("situ", "packed_lora_bfloat16")


@pytest.mark.parametrize("sizes", grouped_kernels.SIZES)
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in grouped_kernels.PROGRAMS
    ],
)
def test_values_and_gradients_equal_reference(name, sizes):
    grouped_kernels.compare(name, "pallas_tpu", grouped_kernels.SIZES[sizes])


_visits = jax.jit(worklist.visits, static_argnums=(1, 2), static_argnames="empty_too")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 19]), st.booleans())
def test_visits_cover_every_row_once_and_stay_together(seed, num_tiles, empty_too):
    tile_rows = 16
    rng = np.random.default_rng(seed)
    num_rows = num_tiles * tile_rows
    sizes = rng.multinomial(rng.integers(0, num_rows + 1), rng.dirichlet(np.full(6, 0.3)))
    bounds = worklist.bounds_of(jnp.asarray(sizes))
    if not empty_too:
        bounds = worklist.with_tail(bounds, num_rows)
        sizes = [*sizes, num_rows - sum(sizes)]
    items = np.asarray(_visits(bounds, num_rows, tile_rows, empty_too=empty_too))
    owner = np.full(num_rows, -1)
    for group, tile, first, end in items.T:
        assert 0 <= tile < num_tiles and first <= end
        assert first == end or tile * tile_rows <= first < end <= (tile + 1) * tile_rows
        assert (owner[first:end] == -1).all()
        owner[first:end] = group
    np.testing.assert_array_equal(owner[: sum(sizes)], np.repeat(np.arange(len(sizes)), sizes))
    # what is written again must still be in the core's memory: groups and tiles never come back
    assert (np.diff(items[0]) >= 0).all()
    assert (np.diff(items[1]) >= 0).all()
    if empty_too:
        assert set(items[0]) == set(range(6))
    else:
        assert set(items[1]) == set(range(num_tiles))


def test_tiles_are_unpacked_exactly():
    packed, scales, want = grouped_kernels.every_code()
    got = pallas_tpu_rows.unpack(packed, scales, jnp.bfloat16)
    number = ~np.isnan(np.asarray(want, np.float32))
    for part, half in zip((want[0::2], want[1::2]), got, strict=True):
        held = number[:16]
        bits = [np.asarray(x).view(np.uint16)[held] for x in (half, part)]
        np.testing.assert_array_equal(*bits)


def test_frozen_weights_cost_no_weight_gradient():
    rows, sizes = jnp.ones((90, 16)), jnp.array([1, 63, 0, 7, 9], jnp.int32)
    weights = jnp.ones((5, 16, 16))

    def kernels(argnums):
        fn = lambda r, w: jnp.sum(grouped_matmul(r, w, sizes, impl="pallas_tpu"))  # noqa: E731
        return grouped_kernels.kernels_in(jax.grad(fn, argnums), rows, weights)

    assert kernels((0, 1)) == ["grouped_rows", "grouped_drows", "grouped_dbase"]
    assert kernels(0) == ["grouped_rows", "grouped_drows"]


@pytest.mark.slow
def test_sharded():
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("expert")
    rows = jax.random.normal(jax.random.key(0), (2 * 40, 16))
    weights = jax.random.normal(jax.random.key(1), (4, 16, 32)) / 4
    sizes = jnp.array([3, 20, 0, 31], jnp.int32)

    def grads(impl):
        def local(rows, weights, sizes):
            return grouped_matmul(rows, weights, sizes, activation="situ", impl=impl)

        fn = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        of = jax.grad(lambda r, w: jnp.sum(jnp.sin(fn(r, w, sizes))), (0, 1))
        return jax.jit(of)(rows, weights)

    for got, want in zip(grads("pallas_tpu"), grads("chunked"), strict=True):
        assert relative_rms(got, want) <= 1e-6


def test_refusals():
    rows, sizes = jnp.ones((3, 4)), jnp.array([1, 2])
    with pytest.raises(NotImplementedError, match="bfloat16"):
        grouped_matmul(rows, jnp.ones((2, 4, 6), "bfloat16"), sizes, impl="pallas_tpu")
    with pytest.raises(NotImplementedError, match="no tile divides 3104"):
        tiles.cols_of_visit(6144, 3104, "bfloat16", packed_rows=True)


@pytest.mark.parametrize(("depth", "width"), [(7168, 3072), (6144, 3584), (3072, 3584), (96, 160)])
@pytest.mark.parametrize("packed_rows", [False, True])
def test_columns_of_a_tile(depth, width, packed_rows):
    cols = tiles.cols_of_visit(depth, width, "bfloat16", packed_rows)
    assert cols == width or cols % (256 if packed_rows else 128) == 0
    assert cols * depth * 2 <= 6 << 20
    assert width % cols == 0


@pytest.mark.parametrize(("columns", "impl"), [(128, "pallas_tpu"), (96, "chunked")])
def test_it_is_chosen_on_a_tpu_where_gate_and_up_have_whole_tiles(columns, impl):
    rows, sizes = jnp.ones((64, 32)), jnp.full(4, 16)

    def product(rows, weights):
        return grouped_matmul(rows, weights, sizes, activation="swiglu")

    with choose.lowering_for("tpu"), choose.recording() as choices:
        jax.eval_shape(product, rows, jax.ShapeDtypeStruct((4, 32, 2 * columns), jnp.float32))
    (choice,) = choices["grouped_matmul"]
    assert choice.impl == impl
    if impl == "chunked":
        ((name, why),) = choice.refused
        assert (name, why) == ("pallas_tpu", "gate and up of 96 columns, not a multiple of 128")
