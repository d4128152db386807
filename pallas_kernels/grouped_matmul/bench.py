"""`grouped_matmul` beside `lax.ragged_dot`: `python -m pallas_kernels.grouped_matmul.bench`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.benching.foreign import jla_ragged_dot, tokamax_ragged_dot
from pallas_kernels.grouped_matmul import grouped_matmul

# experts, rows, K, F, and floors (times faster, times smaller) forward and with gradients
_SHAPES = (
    (64, 4096, 256, 256, (15, 10), (10, 6)),
    (16, 4096, 32, 64, (None, None), (None, None)),
)


def comparisons() -> list[Comparison]:
    """Forward, and with gradients of rows and weights."""
    rows = []
    for experts, num_rows, k_dim, f_dim, forward, backward in _SHAPES:
        make = functools.partial(_make, experts, num_rows, k_dim, f_dim)
        rows += both_ways(
            "grouped_matmul", f"E{experts} M{num_rows} {k_dim}->{f_dim}", "lax.ragged_dot",
            grouped_matmul, jax.lax.ragged_dot, make, argnums=(0, 1), forward=forward,
            backward=backward,
        )  # fmt: skip
    return rows


def _make(experts: int, num_rows: int, k_dim: int, f_dim: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (num_rows, k_dim))
    weights = jax.random.normal(keys[1], (experts, k_dim, f_dim))
    ids = jax.random.randint(keys[2], (num_rows,), 0, experts)
    return rows, weights, jnp.bincount(ids, length=experts).astype(jnp.int32)


def device_cases(toy: bool) -> list[DeviceCase]:
    """Experts of one device: K3's at EP64, both maps, and many small ones."""
    if toy:
        return [
            _device_case("toy", 3, 96, 32, 64, None),
            _device_case("toy SiTU", 3, 96, 32, 64, "situ"),
        ]
    return [
        _device_case(
            "K3 down", 14, 65_536, 3072, 3584, None,
            ">= 0.8 x dense product, >= 1.0 x torch._grouped_mm",
        ),
        _device_case("K3 gate, up, SiTU", 14, 65_536, 3584, 6144, "situ", "the product alone"),
        _device_case("many experts", 512, 65_536, 2048, 1024, None, ">= 1.3 x torch._grouped_mm"),
    ]  # fmt: skip


def _device_case(
    name: str, E: int, M: int, K: int, F: int, activation: str | None, target: str = ""
) -> DeviceCase:
    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        rows = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
        weights = jax.random.normal(keys[1], (E, K, F), jnp.bfloat16) * K**-0.5
        ids = jax.random.randint(keys[2], (M,), 0, E)
        return rows, weights, jnp.bincount(ids, length=E).astype(jnp.int32)

    def call(*args: jax.Array, impl: str) -> jax.Array:
        return grouped_matmul(*args, activation=activation, impl=impl)

    plain: dict[str, Any] = {}
    if activation is None:
        plain = {
            "dense product": lambda rows, weights, sizes: rows @ weights[0],
            "lax.ragged_dot": jax.lax.ragged_dot, "tokamax": tokamax_ragged_dot,
            "jax-linear-attention": jla_ragged_dot,
        }  # fmt: skip
    return DeviceCase(
        "grouped_matmul", f"{name} E{E} M{M} {K}->{F}", make, call, argnums=(0, 1),
        flops=(2 * M * K * F, 4 * M * K * F), tolerance=1e-2, others=plain,
        torch=("torch._grouped_mm",) if activation is None else (),
        dims={"E": E, "M": M, "K": K, "F": F}, target=target,
    )  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
