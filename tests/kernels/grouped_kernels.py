"""What the tests of grouped_matmul's kernels share: one program for many group sizes."""

import functools
from typing import NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul, mxfp4, specs
from pallas_kernels.testing import relative_rms

ROWS = 131  # a prime, so that no tile divides it

# Of 131 rows: groups that share tiles, empty ones, one with all, some that leave rows, none.
SIZES = {
    "shared": (33, 0, 64, 1, 33),
    "one_has_all": (0, 0, 131, 0, 0),
    "rows_behind": (0, 17, 0, 70, 2),
    "nothing": (0, 0, 0, 0, 0),
}


class Program(NamedTuple):
    """A kind of call; `rank` 0 for no adapters."""

    k_dim: int
    f_dim: int
    activation: str | None = None
    dtype: str = "float32"
    packed: bool = False
    rank: int = 0
    shared_a: bool = False


PROGRAMS = {
    "plain": Program(160, 96),
    "situ": Program(96, 160, "situ"),
    "swiglu_bfloat16": Program(160, 192, "swiglu", "bfloat16"),
    "lora": Program(33, 160, rank=5),
    "packed_lora_bfloat16": Program(
        512, 192, "situ", "bfloat16", packed=True, rank=8, shared_a=True
    ),
    "packed": Program(64, 96, packed=True),
    "packed_lora": Program(96, 192, "swiglu", packed=True, rank=3),
}


def inputs_of(program: Program, seed: int = 0) -> tuple[dict, dict]:
    """Arrays that are differentiated, and those that are not."""
    case = specs.Case(
        num_rows=ROWS, group_sizes=SIZES["shared"], **{**program._asdict(), "dtype": program.dtype}
    )
    arrays = specs.make_all(case, seed)
    arrays.pop("group_sizes")
    fixed = {n: arrays.pop(n) for n in ("weights", "scales") if program.packed}
    return arrays, fixed


@functools.cache
def step_of(name: str, impl: str):
    """jitted (wanted, fixed, sizes, cotangent) -> value and gradients of all that is wanted."""
    program = PROGRAMS[name]

    def step(wanted, fixed, sizes, d_out):
        def fn(wanted):
            given = {**wanted, **fixed}
            lora = (given["a"], given["b"]) if "a" in given else None
            return grouped_matmul(
                given["rows"], given["weights"], sizes, activation=program.activation,
                scales=given.get("scales"), lora=lora, lora_scale=0.7, impl=impl,
            )  # fmt: skip

        out, pullback = jax.vjp(fn, wanted)
        return {"out": out, **pullback(d_out.astype(out.dtype))[0]}

    # a quarter of the compile time; the numbers stay
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


def compare(name: str, impl: str, sizes: tuple[int, ...]) -> None:
    """`impl` against `ref`: rows behind the groups hold NaN, in rows and cotangent."""
    program, count = PROGRAMS[name], sum(sizes)
    wanted, fixed = inputs_of(program)
    width = program.f_dim // (2 if program.activation else 1)
    d_out = jax.random.normal(jax.random.key(7), (ROWS, width)).astype(program.dtype)
    poisoned = wanted | {"rows": wanted["rows"].at[count:].set(jnp.nan)}
    sizes = jnp.array(sizes, jnp.int32)
    got = step_of(name, impl)(poisoned, fixed, sizes, d_out.at[count:].set(jnp.nan))
    exact = {n: a.astype(jnp.float32) for n, a in wanted.items()}
    d_exact = d_out.astype(jnp.float32).at[count:].set(0)
    want = step_of(name, "ref")(exact, fixed, sizes, d_exact)
    for part, value in got.items():
        if part in ("out", "rows"):
            np.testing.assert_array_equal(np.asarray(value[count:], np.float32), 0)
        elif value.ndim == 3:
            empty = np.asarray(sizes) == 0
            np.testing.assert_array_equal(np.asarray(value, np.float32)[empty], 0)
        error = relative_rms(value, want[part], floor=1e-3 if count == 0 else 1e-30)
        assert error <= specs.TOLERANCES[program.dtype], (part, error)


def every_code() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed [16, 256] with every code under every scale [1, 256], and what they decode to."""
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 256, 1)
    low_first = codes[0::2] | codes[1::2] << 4
    packed = jnp.asarray(np.concatenate([low_first, low_first[::-1]]))
    scales = jnp.arange(256, dtype=jnp.uint8)[None]
    return packed, scales, mxfp4.decode(packed, scales, jnp.bfloat16)


def kernels_in(fn, *args) -> list[str]:
    """Names of the kernels that a function calls, in its trace, before any compiler."""
    found: list[str] = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                found.append(eqn.params["name"])
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return found
