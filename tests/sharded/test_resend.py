"""The backward pass sends nothing a second time where the policy keeps what was exchanged.

Counted in the compiled program of two scanned layers, whose second forward pass XLA cannot merge
with the first.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from moejax.memory.layer_loop import Loop, run_layers
from moejax.partitioning.expert_exchange import exchange_experts
from tests.sharded.meshes import EXPERT8, mesh_of
from tests.sharded.test_exchange import FAST_COMPILE, E, experts, routings, values

ROWS = re.compile(r"= \(?f32\[.* (?:all-to-all|all-gather)\(")


@functools.cache
def exchanges_of_rows(exchange: str, factor: float, policy: str) -> int:
    """Collectives that move rows in the forward and backward pass of one layer."""
    (x, combine, weights), _ = values(2)
    ids = routings(2)["random"]

    def layer(x_BTL, weights, combine):
        out_BTL, _ = exchange_experts(
            x_BTL, ids, combine, weights, experts, num_experts=E, exchange=exchange,
            buffer_factor=factor, receive_factor=factor,
        )  # fmt: skip
        return x_BTL + jnp.tanh(out_BTL), None  # its derivative needs the output again

    def loss(x_BTL, weights):
        twice = jax.tree.map(lambda w: jnp.broadcast_to(w, (1, 2, *w.shape)), weights)
        x_BTL, _ = run_layers(
            [layer], x_BTL, [twice], combine, Loop(1, (2,)), policy=policy,
            keep=lambda x: x, rebuild=lambda _, x: x,
        )  # fmt: skip
        return jnp.sum(x_BTL**2)

    with jax.set_mesh(mesh_of(EXPERT8)):
        jitted = jax.jit(jax.grad(loss, (0, 1)), compiler_options=FAST_COMPILE)
        return len(ROWS.findall(jitted.lower(x, weights).compile().as_text()))


WORST = 8.0  # no further rounds: two exchanges there and back, and the same for the gradients


@pytest.mark.parametrize(
    "exchange,factor",
    [
        ("ragged", WORST),
        pytest.param("ragged", 1.25, marks=pytest.mark.slow),
        pytest.param("padded", 1.25, marks=pytest.mark.slow),
    ],
)
def test_kept_rows_are_not_sent_again(exchange, factor):
    once = exchanges_of_rows(exchange, factor, "none")
    assert exchanges_of_rows(exchange, factor, "exchange") == once
    assert exchanges_of_rows(exchange, factor, "full") > once  # the count sees what is sent again
    if factor == WORST:
        assert once == 4
