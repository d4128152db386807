"""Before the first step: does the expert exchange of this mesh compute what `local` computes?

One small MoE layer with the run's experts, router, exchange and slices goes forward and backward
twice on the real devices, once through the run's exchange and once through `local`. Every token's
experts are given, so that each expert has rows on the wire and one device gets more than its buffer
holds. A collective that loses, doubles or swaps rows then shows as an expert, and an expert is a
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import ConfigError, MoeConfig, RunConfig
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.partitioning import BATCH_AXES, num_batch_shards
from moejax.partitioning.expert_exchange.api import resolve_exchange

# Largest relative difference (L2, of one expert) that rounding may make; a lost row makes 1 / the
# square root of an expert's rows, some 0.1.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
PARTS = (
    "gradient of its gate and up weights", "gradient of its down weights", "outputs of its tokens",
    "input gradient of its tokens", "gradient of its router weights",
)  # fmt: skip
_SEED = 0
_LOST = 1e12  # squared relative difference of a token that is not finite


class SelfCheckError(ConfigError):
    """The expert exchange is wrong on these devices."""


class SelfCheck(NamedTuple):
    """What the check saw.

    Attributes:
      differences: relative difference of every part and expert, [parts, E]; infinite where
        something is not finite.
      tolerance: the largest difference that passes.
      exchange: the exchange that ran.
      dtype: in which it ran.
      holders: for every place along the ``expert`` axis the devices there, as people read them.
      seconds: what the check took.
    """

    differences: np.ndarray
    tolerance: float
    exchange: str
    dtype: str
    holders: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return bool(self.differences.max() <= self.tolerance)

    @property
    def worst(self) -> str:
        """The expert that differs most: its number, where it is, by how much and in what."""
        part, expert = np.unravel_index(np.argmax(self.differences), self.differences.shape)
        place = expert * len(self.holders) // self.differences.shape[1]
        return (
            f"expert {expert} on {self.holders[place]} differs by "
            f"{self.differences[part, expert]:.2g} in the {PARTS[part]} "
            f"(allowed for {self.dtype}: {self.tolerance:.0e})"
        )


def self_check(cfg: RunConfig, mesh: Mesh, say: Callable[[str], Any]) -> None:
    """Runs the check where the config wants it and tells in one line what it saw.

    Raises:
      SelfCheckError: an expert differs by more than rounding explains.
    """
    axis = mesh.shape["expert"]
    wanted = cfg.train.self_check
    if "moe" not in cfg.model.ffn_kinds() or wanted == "off" or (wanted == "auto" and axis == 1):
        return
    found = check_exchange(cfg, mesh)
    if not found.passed:
        wrong = int((found.differences.max(0) > found.tolerance).sum())
        raise SelfCheckError(
            f"self-check: the expert exchange {found.exchange!r} of this mesh does not compute "
            f"what 'local' computes: {found.worst}; {wrong} of {found.differences.shape[1]} "
            "experts are wrong. Nothing was trained. Try another model.moe.exchange; "
            "train.self_check=off trains without this check."
        )
    say(
        f"self-check: {found.exchange} exchange over {axis} devices equals local; worst: "
        f"{found.worst}; {found.seconds:.1f} s"
    )


def check_exchange(cfg: RunConfig, mesh: Mesh) -> SelfCheck:
    """Compares the run's exchange with `local` on a mesh; every process of the mesh calls it.

    Args:
      cfg: its `model.moe` and `train.compute_dtype` are used, with small widths.
      mesh: the run's.
    """
    began = time.perf_counter()
    dtype, platform = cfg.train.compute_dtype, mesh.devices.flat[0].platform
    moe = _small(cfg.model.moe, platform)
    tolerance = TOLERANCE[dtype]
    # As exact as the dtype is: TF32 products would ask for a tolerance that hides a lost row.
    precision = jax.default_matmul_precision("highest" if dtype == "float32" else "default")
    ids_BTA = given_experts(num_batch_shards(dict(mesh.shape)), moe, mesh.shape["expert"])
    options = {"xla_backend_optimization_level": 0} if platform == "cpu" else None
    with jax.set_mesh(mesh), precision:
        compare = jax.jit(
            lambda: _differences(moe, cfg, ids_BTA),
            out_shardings=NamedSharding(mesh, P()),
            compiler_options=options,
        )
        differences = np.asarray(compare(), np.float64)
    return SelfCheck(
        np.where(differences < 1e3, differences, np.inf),  # what is no number is not smaller
        tolerance,
        resolve_exchange(moe.exchange, mesh.shape["expert"], platform),
        dtype,
        _holders(mesh),
        time.perf_counter() - began,
    )


def _small(moe: MoeConfig, platform: str) -> MoeConfig:
    """The run's experts and exchange at widths that cost nothing, and that kernels accept.

    Experts are plain: an exchange carries tokens, and these are too narrow to be packed.
    """
    width = 16 if platform == "cpu" else 128
    return moe.replace(
        latent_dim=0, expert_dim=width, num_shared=0, balance="none", aux_weight=0.0,
        capacity_factor=0.0, expert_format="plain",
    )  # fmt: skip


def given_experts(rows: int, moe: MoeConfig, ranks: int) -> np.ndarray:
    """Experts of every token: int32 [rows, T, A], the same in every process.

    All experts in a shuffled order, dealt again and again; every second token instead takes those
    of the last device, which so gets more than its buffer holds.
    """
    E, A, local = moe.num_experts, moe.top_k, moe.num_experts // ranks
    deal = -(-E // A)  # tokens that together have every expert
    T = max(-(-8 * deal // rows), 16)
    token_M = np.arange(rows * T)
    dealt_M = token_M // 2
    rng = np.random.default_rng(_SEED)
    orders_ZE = np.stack([rng.permutation(E) for _ in range(dealt_M[-1] // deal + 1)])
    place_MA = ((dealt_M % deal)[:, None] * A + np.arange(A)) % E
    ids_MA = orders_ZE[(dealt_M // deal)[:, None], place_MA]
    first_M = E - local + token_M // 2 % max(local - A + 1, 1)
    crowd_MA = (first_M[:, None] + np.arange(A)) % E
    ids_MA = np.where((token_M % 2 == 1)[:, None], crowd_MA, ids_MA)
    return ids_MA.reshape(rows, T, A).astype(np.int32)


def _differences(moe: MoeConfig, cfg: RunConfig, ids_BTA: np.ndarray) -> jax.Array:
    """Relative difference of every part and expert between the exchange and `local`."""
    exchanges = (moe.exchange, "local")
    got, want = (_through(moe.replace(exchange=name), cfg, ids_BTA) for name in exchanges)
    ids_MA = ids_BTA.reshape(-1, ids_BTA.shape[-1])

    def by_expert(got_EX, want_EX):
        pair = (got_EX - want_EX, want_EX)
        off, size = (jnp.sum(a.reshape(a.shape[0], -1) ** 2, -1) for a in pair)
        # An expert whose own gradient happens to vanish is measured by the others'.
        return jnp.sqrt(off / jnp.maximum(size, jnp.mean(size)))

    def by_token(got_BTD, want_BTD):
        off, size = (jnp.sum(a**2, -1).reshape(-1, 1) for a in (got_BTD - want_BTD, want_BTD))
        off = jnp.where(jnp.isfinite(off), off, _LOST * size)
        zeros_E = jnp.zeros(moe.num_experts, jnp.float32)
        off_E, size_E = (zeros_E.at[ids_MA].add(a) for a in (off, size))
        return jnp.sqrt(off_E / size_E)

    measures = (by_expert, by_expert, by_token, by_token, by_expert)
    return jnp.stack([by(a, b) for by, a, b in zip(measures, got, want, strict=True)])


def _through(moe: MoeConfig, cfg: RunConfig, ids_BTA: np.ndarray) -> tuple[jax.Array, ...]:
    """What `PARTS` names, float32: experts or tokens in front."""
    width, (B, T, _) = moe.expert_dim, ids_BTA.shape
    dtype = jnp.dtype(cfg.train.compute_dtype)
    layer = LatentMoe(
        width, moe, cfg.model.ffn, cfg.model.norm_eps, width**-0.5, nnx.Rngs(params=_SEED)
    )
    graph, params, *rest = nnx.split(layer, nnx.Param, ...)
    keys = jax.random.split(jax.random.key(_SEED), 2)
    where = P(BATCH_AXES)
    x_BTD, cotangent_BTD = (
        jax.lax.with_sharding_constraint(jax.random.normal(k, (B, T, width), dtype), where)
        for k in keys
    )
    given_BTA = jax.lax.with_sharding_constraint(jnp.asarray(ids_BTA), where)

    def run(params, x_BTD):
        layer = nnx.merge(graph, params, *rest)
        return layer(x_BTD, jnp.ones((B, T), jnp.int32), given_BTA)[0]

    out_BTD, pull = jax.vjp(run, params, x_BTD)
    grads, dx_BTD = pull(cotangent_BTD)
    grads = nnx.to_pure_dict(grads)
    experts, router = grads["experts"], grads["router"]["weight"]
    whole = (experts["gate_up"], experts["down"], out_BTD, dx_BTD, router.T)
    return tuple(a.astype(jnp.float32) for a in whole)


def _holders(mesh: Mesh) -> tuple[str, ...]:
    """Who holds the experts at each place of the ``expert`` axis."""
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index("expert"), 0)
    hosts = {device.process_index for device in mesh.devices.flat}
    names = []
    for line in lines.reshape(lines.shape[0], -1):
        shown = ", ".join(str(device.id) for device in line[:4]) + (
            ", ..." if len(line) > 4 else ""
        )
        host = f" (host {line[0].process_index})" if len(hosts) > 1 and len(line) == 1 else ""
        names.append(f"device{'s' * (len(line) > 1)} {shown}{host}")
    return tuple(names)
