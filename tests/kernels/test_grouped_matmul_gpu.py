"""grouped_matmul's kernels for GPUs, in the interpreter, against the loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul, pallas_gpu_rows, specs, tiles, worklist
from pallas_kernels.testing import relative_rms
from tests.kernels import grouped_kernels

QUICK = ("situ", "lora", "packed_lora_bfloat16")


@pytest.mark.parametrize("sizes", grouped_kernels.SIZES)
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in grouped_kernels.PROGRAMS
    ],
)
def test_values_and_gradients_equal_reference(name, sizes):
    grouped_kernels.compare(name, "pallas_gpu", grouped_kernels.SIZES[sizes])


_tiles = jax.jit(worklist.tiles, static_argnums=(1, 2, 3))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 63, 131, 300]), st.sampled_from([16, 64]))
def test_every_row_is_in_one_tile_of_its_group(seed, num_rows, tile_rows):
    rng = np.random.default_rng(seed)
    total = int(rng.integers(0, num_rows + 1))
    sizes = rng.multinomial(total, rng.dirichlet(np.full(6, 0.3)))
    bounds = worklist.with_tail(worklist.bounds_of(jnp.asarray(sizes)), num_rows)
    items = np.asarray(_tiles(bounds, num_rows, tile_rows, 16))
    assert items.shape[1] % 16 == 0 and items.shape[1] < num_rows // tile_rows + 7 + 16
    owner, count = np.full(num_rows, -1), 0
    for group, first, end in items.T:
        assert first <= end <= first + tile_rows
        assert (owner[first:end] == -1).all()
        owner[first:end] = group
        count += end > first
    np.testing.assert_array_equal(owner, np.repeat(np.arange(7), [*sizes, num_rows - total]))
    # no more tiles than the groups need: what is not there costs no tile
    assert count == sum(-(-n // tile_rows) for n in [*sizes, num_rows - total])


def test_tiles_are_unpacked_exactly():
    packed, scales, want = grouped_kernels.every_code()
    got = pallas_gpu_rows.unpack(packed, scales, jnp.bfloat16)
    number = ~np.isnan(np.asarray(want, np.float32))
    bits = [np.asarray(x).view(np.uint16)[number] for x in (got, want)]
    np.testing.assert_array_equal(*bits)
    np.testing.assert_array_equal(np.isnan(np.asarray(got, np.float32)), ~number)


def kernels_of(wanted, activation="situ"):
    """Kernels of a gradient of the named arguments."""
    case = specs.Case(num_rows=40, k_dim=32, f_dim=32, group_sizes=(20, 9), rank=4)
    inputs = specs.make_all(case)
    sizes = inputs.pop("group_sizes")

    def grads(inputs):
        def fn(chosen):
            given = inputs | chosen
            lora = (given["a"], given["b"])
            return jnp.sum(
                grouped_matmul(
                    given["rows"], given["weights"], sizes, activation=activation, lora=lora,
                    impl="pallas_gpu",
                )
            )  # fmt: skip

        return jax.grad(fn)({name: inputs[name] for name in wanted})

    return set(grouped_kernels.kernels_in(grads, inputs))


def test_only_what_is_wanted_is_computed():
    forward = {"grouped_rows", "grouped_low"}
    assert kernels_of(("rows", "weights", "a", "b")) == forward | {
        "grouped_dh", "grouped_drows", "grouped_dlow", "grouped_dbase", "grouped_da", "grouped_db",
    }  # fmt: skip
    frozen = kernels_of(("rows", "a", "b"))
    assert "grouped_dbase" not in frozen and "grouped_da" in frozen
    assert kernels_of(("b",), activation=None) == forward | {"grouped_db"}


@pytest.mark.slow
def test_mapped_and_sharded():
    case = specs.CASES["packed_swiglu_shared_a"]
    many = [specs.make_all(case, seed) for seed in (0, 3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *many)

    def step(impl, inputs):
        def fn(wanted):
            given = inputs | wanted
            return jnp.sum(
                grouped_matmul(
                    given["rows"], given["weights"], given["group_sizes"], activation="swiglu",
                    scales=given["scales"], lora=(given["a"], given["b"]), impl=impl,
                ) ** 2
            )  # fmt: skip

        return jax.grad(fn)({name: inputs[name] for name in ("rows", "a", "b")})

    want = jax.jit(jax.vmap(lambda x: step("chunked", x)))(stacked)
    mapped = jax.jit(jax.vmap(lambda x: step("pallas_gpu", x)))(stacked)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("expert")

    def local(inputs):
        grads = step("pallas_gpu", jax.tree.map(lambda x: x[0], inputs))
        return jax.tree.map(lambda x: x[None], grads)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for got in (mapped, jax.jit(sharded)(stacked)):
        for name, grad in want.items():
            assert relative_rms(got[name], grad) <= 1e-6


def test_refusals():
    rows, sizes = jnp.ones((3, 4)), jnp.array([1, 2])
    with pytest.raises(NotImplementedError, match="bfloat16"):
        grouped_matmul(rows, jnp.ones((2, 4, 6), "bfloat16"), sizes, impl="pallas_gpu")
    with pytest.raises(NotImplementedError, match="float16"):
        half = rows.astype("float16"), jnp.ones((2, 4, 6), "float16")
        grouped_matmul(*half, sizes, impl="pallas_gpu")
    huge = jax.ShapeDtypeStruct((256, 1792, 6144), "uint8")
    scales = jax.ShapeDtypeStruct((256, 112, 6144), "uint8")
    with pytest.raises(NotImplementedError, match="4 GiB"):
        jax.eval_shape(
            lambda r, w, n, s: grouped_matmul(r, w, n, scales=s, impl="pallas_gpu"),
            jax.ShapeDtypeStruct((64, 3584), "bfloat16"), huge,
            jax.ShapeDtypeStruct((256,), "int32"), scales,
        )  # fmt: skip


@pytest.mark.parametrize("mean_rows", [1, 20, 70, 5000])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_fit_a_program(mean_rows, gated):
    for backward in (False, True)[: 1 + gated]:
        sizes = tiles.Sizes(mean_rows, 3584, 3072, "bfloat16", gated=gated, backward=backward)
        chosen = tiles.tiles_for(sizes)
        assert all(n & (n - 1) == 0 for n in chosen[:4])
        weights = 2 if gated else 1
        sums = chosen.rows * chosen.cols * weights / (chosen.warps * 32)
        assert sums <= (64 if backward else 128)  # registers of a thread
        step = 2 * chosen.depth * (chosen.rows + weights * chosen.cols)
        assert step * chosen.stages <= 227 * 1024
