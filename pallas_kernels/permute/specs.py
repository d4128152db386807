"""Named cases of permute and unpermute."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gate_case import GateCase
from pallas_kernels.permute.api import permute, unpermute
from pallas_kernels.permute.plan import PermutePlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one case; `unrouted` is the share of assignments to no expert."""

    num_tokens: int
    num_active: int
    num_experts: int
    width: int
    dtype: str = "float32"
    unrouted: float = 0.0

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by one direction."""
        item = jnp.dtype(self.dtype).itemsize
        return (self.num_active + 1) * self.num_tokens * self.width * item


CASES = {
    "one_token": Case(num_tokens=1, num_active=1, num_experts=1, width=5),
    "odd": Case(num_tokens=63, num_active=3, num_experts=7, width=9),
    "large_odd": Case(num_tokens=1000, num_active=2, num_experts=5, width=16),
    "more_experts_than_rows": Case(num_tokens=5, num_active=2, num_experts=64, width=8),
    "unrouted": Case(num_tokens=64, num_active=4, num_experts=6, width=8, unrouted=0.3),
    "bfloat16": Case(num_tokens=65, num_active=4, num_experts=8, width=32, dtype="bfloat16"),
}

# relative root mean square against the reference in float32
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}


def make_inputs(case: Case, seed: int = 0):
    """x [M, L], weights [M, A], expert_ids [M, A] from a seed."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (case.num_tokens, case.num_active)
    x = jax.random.normal(keys[0], (case.num_tokens, case.width)).astype(case.dtype)
    weights = jax.random.uniform(keys[1], shape)
    ids = jax.random.randint(keys[2], shape, 0, case.num_experts)
    unrouted = jax.random.bernoulli(keys[3], case.unrouted, shape)
    return x, weights, jnp.where(unrouted, case.num_experts, ids)


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: K3's and Kimi-Linear's routed rows, both ways, with their gradients."""
    if platform != "gpu":
        return []
    cases = []
    for model, (tokens, active, experts, width) in {
        "K3": (8192, 16, 896, 3584), "Kimi-Linear": (8192, 8, 256, 2304),
    }.items():  # fmt: skip
        num_rows = tokens * active
        plan = [
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((num_rows,), (tokens, active), (experts,))
        ]
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        rows = jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16)
        weights = jax.ShapeDtypeStruct((tokens, active), jnp.float32)
        cases += [
            GateCase(f"permute {model}", _both_ways(_permute), (x, rows, *plan), quick=True),
            GateCase(f"unpermute {model}", _both_ways(_unpermute), (rows, weights, x, *plan)),
        ]
    return cases


def _permute(x, *plan):
    return permute(x, PermutePlan(*plan), impl="pallas_gpu")


def _unpermute(rows, weights, *plan):
    return unpermute(rows, weights, PermutePlan(*plan), impl="pallas_gpu")


def _both_ways(fn):
    """The function and its pullback, of arguments, a cotangent and the three parts of a plan."""

    def run(*args):
        *inputs, cotangent = args[:-3]
        out, pullback = jax.vjp(lambda *a: fn(*a, *args[-3:]), *inputs)
        return out, pullback(cotangent)

    return run
