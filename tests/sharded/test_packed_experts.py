"""Packed experts with adapters: wherever they live, what plain ones of the same values give.

Outputs and gradients of tokens, combine weights and adapters, against one device that holds the
unpacked experts; A per expert, or one for all, whose gradient is then a sum over all devices.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.adapter import AdapterSpec, attach
from moejax.layers.moe.experts import Experts
from moejax.partitioning.expert_exchange import Copies, exchange_experts
from pallas_kernels.grouped_matmul import mxfp4
from tests.sharded.meshes import (
    DATA2_EXPERT4,
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    assert_leaves_agree,
    mesh_of,
    named,
    relative_error,
)

B, T, A, E, WIDTH, INNER, RANK = 8, 6, 3, 8, 32, 64, 3
FAST_COMPILE = {"xla_backend_optimization_level": 0}
# Copies of experts 3 and 1 on the first and third of four devices.
SOURCES = np.array([3, E, 1, E], np.int32)


class Case(NamedTuple):
    mesh: dict
    exchange: str
    level: str = "expert"
    hosts: int = 1
    slices: int = 1
    factor: float = 1.25
    shared_a: bool = True
    copies: bool = False

    def __str__(self) -> str:
        a = "shared" if self.shared_a else "own"
        return f"{named(self.mesh)}-{self.exchange}-{self.level}-x{self.factor}-{a}" + (
            "-copies" if self.copies else ""
        )


CASES = [
    Case(DATA2_FSDP2_EXPERT2, "padded", slices=2, shared_a=False),
    Case(DATA2_EXPERT4, "padded", copies=True),
]
MORE = [
    Case(FSDP8, "local"),
    Case(EXPERT8, "ragged", "host", hosts=2, factor=0.5),
    Case(FSDP2_EXPERT4, "ragged", "device", factor=0.25),
    Case(EXPERT8, "padded", factor=0.25, slices=2),
    Case(EXPERT8, "padded", "host", hosts=4, slices=2, shared_a=False),
    Case(FSDP2_EXPERT4, "ragged", copies=True, shared_a=False),
    Case(DATA2_FSDP2_EXPERT2, "padded", "device", factor=0.25),
]


@functools.cache
def experts(shared_a: bool):
    """Graph, adapters and base of packed experts, and of plain ones of the same values."""

    def make(expert_format):
        cfg = MoeConfig(
            num_experts=E, expert_dim=INNER, latent_dim=WIDTH, expert_format=expert_format
        )
        module = Experts(WIDTH, cfg, FfnConfig(), WIDTH**-0.5, nnx.Rngs(params=0))
        specs = tuple(
            AdapterSpec((), f"{leaf}_proj", (leaf,), None, RANK, 0.7, ((RANK,),), shared_a=shared_a)
            for leaf in ("gate_up", "down")
        )
        attach(module, specs, nnx.Rngs(params=1))
        graph, lora, base = nnx.split(module, lambda path, _: "lora" in path, ...)
        return graph, nnx.to_pure_dict(lora), nnx.to_pure_dict(base)

    packed, (graph, lora, base) = make("mxfp4"), make("plain")
    assert {a.dtype for a in jax.tree.leaves(packed[2])} == {jnp.dtype("uint8")}
    assert jax.tree.map(jnp.shape, packed[1]) == jax.tree.map(jnp.shape, lora)
    for name, width in (("gate_up", 2 * INNER), ("down", WIDTH)):
        codes, scales = (packed[2][n].reshape(E, -1, width) for n in (name, f"{name}_scales"))
        decoded = mxfp4.decode(codes, scales, jnp.float32).reshape(base[name].shape)
        # The same initial values in 4 bits; the largest may be cut from nearly 8 units to 6.
        assert 0.05 < relative_error(decoded, base[name]) <= 0.25
        base[name] = decoded
    rng = np.random.default_rng(5)
    filled = jax.tree.map(lambda a: (0.3 * rng.standard_normal(a.shape)).astype(np.float32), lora)
    return {"mxfp4": (packed[0], packed[2]), "plain": (graph, base)}, filled


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    ids = np.argsort(rng.random((B, T, E)), -1)[..., :A].astype(np.int32)
    ids[rng.random((B, T, A)) < 0.5] = 3  # lopsided, so that small buffers take several rounds
    return draw(B, T, WIDTH), draw(B, T, A), ids, draw(B, T, WIDTH)


def step(graph, base, lora, x, combine, ids, cotangent, options):
    """Output, and gradients of adapters, tokens and combine weights."""

    def forward(lora, x, combine):
        module = nnx.merge(graph, lora, base)
        out, _ = exchange_experts(
            x, ids, combine, module.weights(), module.row_fn(), weight_axes=module.axes(),
            prepare=module.prepare, **options,
        )  # fmt: skip
        return out

    out, pull = jax.vjp(forward, lora, x, combine)
    return out, pull(cotangent)


@functools.cache
def expected(shared_a: bool):
    """One device, plain experts."""
    bases, lora = experts(shared_a)
    x, combine, ids, cotangent = inputs()
    graph, base = bases["plain"]
    run = functools.partial(step, graph, options={"num_experts": E})
    return jax.jit(run, compiler_options=FAST_COMPILE)(base, lora, x, combine, ids, cotangent)


def places(ids: np.ndarray) -> np.ndarray:
    """Experts as places of four devices with a copy each; every other token takes the copy."""
    own = ids + ids // 2
    odd = (np.arange(B * T).reshape(B, T, 1) % 2).astype(bool)
    return np.where(odd & (ids == 3), 2, np.where(odd & (ids == 1), 8, own)).astype(np.int32)


def check(case: Case) -> None:
    bases, lora = experts(case.shared_a)
    x, combine, ids, cotangent = inputs()
    graph, base = bases["mxfp4"]
    options = {"num_experts": E, "exchange": case.exchange, "level": case.level}
    options |= {"hosts": case.hosts, "slices": case.slices}
    options |= {"buffer_factor": case.factor, "receive_factor": case.factor}
    if case.copies:
        ids = places(ids)
        options |= {"num_experts": E + len(SOURCES), "copies": Copies(jnp.asarray(SOURCES), 3)}
    run = functools.partial(step, graph, options=options)
    with jax.set_mesh(mesh_of(case.mesh)):
        jitted = jax.jit(run, compiler_options=FAST_COMPILE)
        out, grads = jitted(base, lora, x, combine, ids, cotangent)
    want_out, want_grads = expected(case.shared_a)
    assert relative_error(out, want_out) <= 1e-5
    assert_leaves_agree(grads, want_grads, 1e-5)
    assert all(np.abs(np.asarray(g)).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_experts_give_what_plain_ones_give(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_packed_experts_give_what_plain_ones_give_everywhere(case):
    check(case)
