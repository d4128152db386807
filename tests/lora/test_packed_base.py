"""Adapters over packed experts learn what they learn over plain ones of the same values."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.step import gradients
from pallas_kernels.grouped_matmul import mxfp4
from tests.lora.adapting import EXPERTS, lively_adapters
from tests.lora.test_training import batch_of, begun, program_on
from tests.models.running import FAST_COMPILE
from tests.models.small_configs import small
from tests.sharded.meshes import FSDP2_EXPERT4, ONE, assert_leaves_agree, relative_error

WIDTH, INNER, E = 32, 64, 8
MODEL = small(
    "mla", 2, norm_eps=1e-2, attn_res_block=0,
    moe={"latent_dim": WIDTH, "expert_dim": INNER, "num_experts": E, "top_k": 2},
)  # fmt: skip
LORA = {"targets": ("q_b_proj",), "target_parameters": EXPERTS, "shared_a": True, "rank": 3}
LORA |= {"alpha": 2.0}


def program(sizes: dict, expert_format: str):
    model = MODEL.replace(moe=MODEL.moe.replace(expert_format=expert_format))
    return program_on(sizes, model=model, lora=LORA, remat="full")


@functools.cache
def start(expert_format: str):
    """The same weights in either form."""
    params, balance = lively_adapters(program(ONE, "plain").parts)

    def walk(node: dict) -> dict:
        out = {name: walk(x) if isinstance(x, dict) else x for name, x in node.items()}
        for name in ("gate_up", "down") if "lora" in node and "gate_up" in node else ():
            value = 0.1 * node[name]
            pair = mxfp4.encode(jnp.asarray(value).reshape(*value.shape[:4], -1))
            if expert_format == "plain":
                out[name] = np.asarray(mxfp4.decode(*pair, jnp.float32)).reshape(value.shape)
                continue
            for end, part in zip(("", "_scales"), pair, strict=True):
                out[name + end] = np.asarray(part).reshape(*part.shape[:4], *value.shape[4:])
        return out

    params["stack0"] = walk(params["stack0"])
    return params, balance


@functools.cache
def compiled(axis: str, expert_format: str):
    """Program of the loss and its gradients on a mesh, and its arguments."""
    run = program({"one": ONE, "mesh": FSDP2_EXPERT4}[axis], expert_format)
    batch = batch_of(run, 1)
    with jax.set_mesh(run.mesh), jax.default_matmul_precision("highest"):
        state = jax.device_put(begun(run, *start(expert_format)), run.shardings)
        step = jax.jit(lambda s, b: gradients(run, s, b), compiler_options=FAST_COMPILE)
        return step.lower(state, batch).compile(), (state, batch)


def learned(axis: str, expert_format: str):
    step, args = compiled(axis, expert_format)
    return jax.tree.map(np.asarray, step(*args))


def test_loss_and_gradients_are_those_of_plain_experts():
    want, got = (learned("one", form) for form in ("plain", "mxfp4"))
    assert_leaves_agree(got, want, 1e-6)
    assert (
        len(jax.tree.leaves(got[0])) == 2 * 2 + 4
    )  # A and B of two q_b_proj, of one layer's experts


@pytest.mark.slow
def test_on_a_mesh():
    (got, got_aux), (want, want_aux) = learned("mesh", "mxfp4"), learned("one", "plain")
    assert_leaves_agree(got, want, 1e-5)
    assert relative_error(got_aux["loss"], want_aux["loss"]) <= 1e-6


def test_no_unpacked_experts_and_no_gradient_of_them():
    """No float array in the program has a value for each of all experts' weights."""
    for name, (rows, columns) in {"gate_up": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}.items():
        step, _ = compiled("one", "mxfp4")
        sizes = [
            int(np.prod([int(n) for n in dims.split(",")]))
            for dims in re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", step.as_text())
        ]
        assert E * rows * columns not in sizes, name
    plain, _ = compiled("one", "plain")
    assert f"f32[1,1,{E},{WIDTH},2,{INNER}]" in plain.as_text()
