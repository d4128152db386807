"""Named cases of grouped_matmul."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gate_case import GateCase
from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.api import grouped_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one case; rows past the sum of `group_sizes` belong to no group.

    Attributes:
      packed: weights are MXFP4.
      rank: of the adapters, 0 for none; with `shared_a` all groups have the same first one.
    """

    num_rows: int
    k_dim: int
    f_dim: int
    group_sizes: tuple[int, ...]
    activation: str | None = None
    dtype: str = "float32"
    packed: bool = False
    rank: int = 0
    shared_a: bool = False

    @property
    def flops(self) -> int:
        """Multiply-adds of the forward, times two."""
        return 2 * sum(self.group_sizes) * self.k_dim * self.f_dim


CASES = {
    "one_row": Case(num_rows=1, k_dim=3, f_dim=5, group_sizes=(1,)),
    "odd": Case(num_rows=63, k_dim=5, f_dim=7, group_sizes=(10, 0, 40, 13)),
    "large_odd": Case(num_rows=1000, k_dim=16, f_dim=24, group_sizes=(1, 63, 700, 0, 236)),
    "all_to_one": Case(num_rows=200, k_dim=8, f_dim=8, group_sizes=(0, 0, 200, 0)),
    "nothing": Case(num_rows=20, k_dim=4, f_dim=6, group_sizes=(0, 0, 0)),
    "tail": Case(num_rows=150, k_dim=8, f_dim=12, group_sizes=(30, 0, 65, 2, 0)),
    "more_groups_than_rows": Case(num_rows=5, k_dim=4, f_dim=4, group_sizes=(1, 0, 2, 0, 1, 0, 1)),
    "situ": Case(num_rows=130, k_dim=8, f_dim=24, group_sizes=(64, 3, 0, 40), activation="situ"),
    "swiglu": Case(num_rows=65, k_dim=8, f_dim=10, group_sizes=(20, 45), activation="swiglu"),
    "bfloat16": Case(num_rows=130, k_dim=32, f_dim=16, group_sizes=(64, 3, 63), dtype="bfloat16"),
    "bfloat16_situ": Case(
        num_rows=65, k_dim=32, f_dim=16, group_sizes=(33, 30), activation="situ", dtype="bfloat16"
    ),
    "lora": Case(num_rows=70, k_dim=5, f_dim=7, group_sizes=(10, 0, 40, 13), rank=3),
    "packed_situ_lora": Case(
        num_rows=150, k_dim=32, f_dim=12, group_sizes=(30, 0, 65, 40), activation="situ",
        packed=True, rank=2,
    ),
    "packed_swiglu_shared_a": Case(
        num_rows=150, k_dim=32, f_dim=12, group_sizes=(30, 0, 65, 40), activation="swiglu",
        packed=True, rank=4, shared_a=True,
    ),
    "bfloat16_packed_lora": Case(
        num_rows=130, k_dim=32, f_dim=16, group_sizes=(64, 3, 63), dtype="bfloat16", packed=True,
        rank=8, shared_a=True,
    ),
}  # fmt: skip

# relative root mean square against the reference in float32
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}


def make_inputs(case: Case, seed: int = 0, tail: float = 0.0):
    """rows, weights, group_sizes; rows that no group owns hold `tail`. Nothing is packed."""
    keys = jax.random.split(jax.random.key(seed), 2)
    rows = jax.random.normal(keys[0], (case.num_rows, case.k_dim)).astype(case.dtype)
    rows = rows.at[sum(case.group_sizes) :].set(tail)
    shape = (len(case.group_sizes), case.k_dim, case.f_dim)
    weights = (jax.random.normal(keys[1], shape) * case.k_dim**-0.5).astype(case.dtype)
    return rows, weights, jnp.asarray(case.group_sizes, jnp.int32)


def make_all(case: Case, seed: int = 0) -> dict:
    """Arguments by name: rows, weights (and scales, if packed), group_sizes, adapters a and b."""
    rows, weights, sizes = make_inputs(case, seed)
    out = {"rows": rows, "weights": weights, "group_sizes": sizes}
    if case.packed:
        out["weights"], out["scales"] = mxfp4.encode(weights)
    if case.rank:
        keys = jax.random.split(jax.random.key(seed + 1), 2)
        num_groups, k_dim, f_dim = weights.shape
        a_shape = (k_dim, case.rank) if case.shared_a else (num_groups, k_dim, case.rank)
        out["a"] = (jax.random.normal(keys[0], a_shape) * k_dim**-0.5).astype(case.dtype)
        b_shape = (num_groups, case.rank, f_dim)
        out["b"] = (jax.random.normal(keys[1], b_shape)).astype(case.dtype)
    return out


# Of one device: both maps of K3's experts where 64 devices share them, and of Kimi-Linear's, all.
_UP = {"K3": (14, 3584, 6144), "Kimi-Linear": (256, 2304, 2048)}
_DOWN = {"K3": (14, 3072, 3584), "Kimi-Linear": (256, 1024, 2304)}
_GATE_ROWS, _GATE_RANK = 65_536, 16
_FORWARD = ("grouped_rows",)
_BACKWARD = ("grouped_drows", "grouped_dbase")


def gate_cases(platform: str) -> list[GateCase]:
    """Both directions at 65,536 rows of bfloat16: plain, with adapters, with packed weights."""
    del platform
    cases = [
        GateCase("grouped up forward K3", _forward("situ"), _gate_args(_UP["K3"]), _FORWARD, True)
    ]
    for model in ("K3", "Kimi-Linear"):
        for name, shape, act in (("up", _UP[model], "situ"), ("down", _DOWN[model], None)):
            bound = (*_BACKWARD, "grouped_dh") if act else _BACKWARD
            args = (*_gate_args(shape), _cotangent(shape, act))
            cases.append(
                GateCase(f"grouped {name} gradients {model}", _gradients(act), args, bound)
            )
    few = jax.ShapeDtypeStruct((8192, 2304), "bfloat16")
    args = few, *_gate_args(_UP["Kimi-Linear"])[1:], jax.ShapeDtypeStruct((8192, 1024), "bfloat16")
    cases.append(GateCase("grouped up gradients, 32 rows a group", _gradients("situ"), args))
    for packed in (False, True):
        for name, shape, act in (("up", _UP["K3"], "situ"), ("down", _DOWN["K3"], None)):
            bound = ("grouped_rows", "grouped_drows", *(("grouped_dh",) if act else ()))
            args = _lora_args(shape, act, packed)
            kind = "MXFP4 LoRA" if packed else "LoRA"
            quick = kind == "LoRA" and name == "up"
            cases.append(GateCase(f"grouped {name} {kind} K3", _adapters(act), args, bound, quick))
    return cases


def _gate_args(shape):
    num_groups, k_dim, _ = shape
    return (
        jax.ShapeDtypeStruct((_GATE_ROWS, k_dim), "bfloat16"),
        jax.ShapeDtypeStruct(shape, "bfloat16"),
        jax.ShapeDtypeStruct((num_groups,), "int32"),
    )


def _cotangent(shape, activation):
    return jax.ShapeDtypeStruct((_GATE_ROWS, shape[2] // (2 if activation else 1)), "bfloat16")


def _lora_args(shape, activation, packed):
    """One first factor for all groups where the map goes up, one a group where it goes down."""
    num_groups, k_dim, f_dim = shape
    rows, weights, sizes = _gate_args(shape)
    a = (k_dim, _GATE_RANK) if activation else (num_groups, k_dim, _GATE_RANK)
    b = num_groups, _GATE_RANK, f_dim
    adapters = [jax.ShapeDtypeStruct(s, "bfloat16") for s in (a, b)]
    if packed:
        codes = (num_groups, k_dim // 2, f_dim), (num_groups, k_dim // mxfp4.BLOCK, f_dim)
        base = tuple(jax.ShapeDtypeStruct(s, "uint8") for s in codes)
    else:
        base = (weights,)
    return (rows, *adapters, sizes, _cotangent(shape, activation), *base)


def _forward(activation):
    return lambda rows, weights, sizes: grouped_matmul(rows, weights, sizes, activation=activation)


def _gradients(activation):
    def fn(rows, weights, sizes, d_out):
        product = lambda r, w: grouped_matmul(r, w, sizes, activation=activation)  # noqa: E731
        return jax.vjp(product, rows, weights)[1](d_out)

    return fn


def _adapters(activation):
    """Values, and gradients of all but the base."""

    def fn(rows, a, b, sizes, d_out, base, scales=None):
        def product(rows, a, b):
            return grouped_matmul(
                rows, base, sizes, activation=activation, scales=scales, lora=(a, b)
            )

        out, pullback = jax.vjp(product, rows, a, b)
        return out, pullback(d_out)

    return fn
