"""Named cases of attn_res."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res.api import attn_res
from pallas_kernels.gate_case import GateCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one case; `used` of the sources count."""

    num_sources: int
    used: int
    batch: int
    length: int
    width: int
    dtype: str = "float32"


CASES = {
    "one_source": Case(num_sources=1, used=1, batch=1, length=1, width=4),
    "odd": Case(num_sources=5, used=3, batch=2, length=63, width=7),
    "long": Case(num_sources=9, used=9, batch=1, length=1000, width=16),
    "bfloat16": Case(num_sources=4, used=3, batch=2, length=65, width=32, dtype="bfloat16"),
}

# relative root mean square against the reference in float32
TOLERANCES = {"float32": 2e-6, "bfloat16": 6e-3}


def make_inputs(case: Case, seed: int = 0, unused: float = 0.0):
    """query, norm_weight, sources; the sources that do not count hold `unused`."""
    keys = jax.random.split(jax.random.key(seed), 3)
    query, norm_weight = (
        jax.random.normal(key, (case.width,)).astype(case.dtype) for key in keys[:2]
    )
    shape = (case.num_sources, case.batch, case.length, case.width)
    sources = jax.random.normal(keys[2], shape).astype(case.dtype)
    return query, norm_weight, sources.at[case.used :].set(unused)


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: K3's mix of 9 of 9 places, forward and with its gradient."""
    shape = jax.ShapeDtypeStruct
    vector, number = shape((7168,), jnp.float32), shape((), jnp.int32)
    sources, mix = shape((9, 1, 8192, 7168), jnp.bfloat16), shape((1, 8192, 7168), jnp.bfloat16)

    def forward(query, norm_weight, sources, num_sources):
        return attn_res(
            query, norm_weight, sources, num_sources=num_sources, eps=1e-5,
            impl=f"pallas_{platform}",
        )  # fmt: skip

    def gradient(*args):
        *inputs, num_sources, d_mix = args
        mix = lambda *a: forward(*(*a, num_sources))  # noqa: E731
        return jax.vjp(mix, *inputs)[1](d_mix)

    inputs = (vector, vector, sources, number)
    return [
        GateCase("attn_res forward K3", forward, inputs, quick=True),
        GateCase("attn_res backward K3", gradient, (*inputs, mix), quick=True),
    ]
