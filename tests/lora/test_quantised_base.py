"""Adapters over a base in 8 bits learn what they learn over the numbers its codes stand for."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.config import ConfigError, LoraConfig, ModelConfig, RunConfig, TrainConfig
from moejax.layers.quantised import decode, encode, format_of, scale_name
from moejax.lora import adapted_parts
from moejax.models.flops import matmul_params_per_token
from moejax.models.parts import count_by_part, flat_infos
from moejax.train.step import gradients
from moejax.train.trainable import stored_params, trainable_mask
from pallas_kernels.grouped_matmul import mxfp4
from tests.lora.adapting import EXPERTS, lively_adapters
from tests.lora.test_training import batch_of, begun, program_on
from tests.models.running import FAST_COMPILE
from tests.models.small_configs import small
from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    FSDP2_EXPERT4,
    FSDP8,
    ONE,
    assert_leaves_agree,
    relative_error,
)
from tests.sharded.stepping import calmer

MODEL = small(
    "kda,dsa,dsa", 3, norm_eps=1e-2,
    moe={"latent_dim": 32, "expert_dim": 32, "top_k": 2, "expert_format": "mxfp4"},
)  # fmt: skip
LORA = {"targets": ("q_proj", "kv_b_proj", "gate_proj"), "target_parameters": EXPERTS[:1]}
LORA |= {"rank": 3, "alpha": 2.0}
MESHES = {
    "one": ONE, "mesh": FSDP2_EXPERT4, "fsdp": FSDP8, "three": DATA2_FSDP2_EXPERT2
}  # fmt: skip


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_the_nearest(form):
    rng = np.random.default_rng(0)
    value = rng.standard_normal((96, 3, 40)) * 10.0 ** rng.integers(-12, 3, (3, 40))
    value = value.astype(np.float32)
    value[:, 0, 0] = 0
    value[:4, 0, 1] = 127, 0.5, 1.5, -2.5  # ties, with a scale of 1
    value[4:, 0, 1] = 0
    codes, scale = jax.jit(lambda value: encode(value, form))(value)
    codes, scale = np.asarray(codes), np.asarray(scale, np.float64)
    again = encode(jnp.asarray(value).transpose(1, 0, 2), form, 1)[0]  # op by op, another layout
    np.testing.assert_array_equal(codes.view(np.uint8), again.transpose(1, 0, 2).view(np.uint8))
    assert np.all(scale == scale.astype(ml_dtypes.bfloat16))
    exact = value.astype(np.float64) / scale
    if form == "int8":
        np.testing.assert_array_equal(codes, np.round(exact))
        assert np.abs(codes).max() == 127 and codes.max(0).min() >= 0
        low = np.abs(value).max(0)[np.abs(value).max(0) > 0] / 127
        assert np.all(scale[np.abs(value).max(0) > 0] <= low * (1 + 2.0**-7))
    else:
        want = exact.astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(codes.astype(np.float64), want.astype(np.float64))
        assert np.all(np.log2(scale) % 1 == 0)
    back = np.asarray(decode(codes, scale.astype(np.float32), jnp.float32), np.float64)
    bound = {"int8": 0.5 * scale, "fp8": np.maximum(2.0**-4 * np.abs(value), 2.0**-10 * scale)}
    assert np.all(np.abs(back - value) <= bound[form] * (1 + 1e-6))


def program(axis: str, form: str, remat: str = "full", model: ModelConfig = MODEL):
    return program_on(MESHES[axis], model=model, lora=LORA | {"base_format": form}, remat=remat)


@functools.cache
def start(form: str, stands_for: str | None = None):
    """Weights of a run in this form; plain ones may be what the codes of another stand for."""
    plain = MODEL.replace(moe=MODEL.moe.replace(expert_format="plain"))
    params, balance = lively_adapters(program("one", "plain", model=plain).parts)
    params = jax.tree_util.tree_map_with_path(calmer, params)
    coded = program("one", stands_for or form).abstract.params

    def walk(node: dict, like: dict) -> dict:
        out = {}
        for name, value in node.items():
            if isinstance(value, dict):
                out[name] = walk(value, like[name])
            elif like[name].dtype == jnp.uint8:
                pair = mxfp4.encode(jnp.asarray(0.1 * value).reshape(*value.shape[:4], -1))
                for end, part in zip(("", "_scales"), pair, strict=True):
                    out[name + end] = np.asarray(part).reshape(*part.shape[:4], *value.shape[4:])
            elif which := format_of(like[name].dtype):
                pair = encode(jnp.asarray(value), which, 2)
                if form == "plain":
                    out[name] = np.asarray(decode(*pair, jnp.float32, 2))
                else:
                    out |= dict(zip((name, scale_name(name)), map(np.asarray, pair), strict=True))
            else:
                out[name] = value
        return out

    return walk(params, coded), balance


@functools.cache
def compiled(axis: str, form: str, remat: str = "full"):
    run = program(axis, form, remat)
    batch = batch_of(run, 1)
    with jax.set_mesh(run.mesh), jax.default_matmul_precision("highest"):
        state = jax.device_put(begun(run, *start(form)), run.shardings)
        step = jax.jit(lambda s, b: gradients(run, s, b), compiler_options=FAST_COMPILE)
        return run, step.lower(state, batch).compile(), batch


def learned(axis: str, form: str, stands_for: str | None = None, remat: str = "full"):
    """Gradients, and what was measured."""
    run, step, batch = compiled(axis, form, remat)
    state = jax.device_put(begun(run, *start(form, stands_for)), run.shardings)
    return jax.tree.map(np.asarray, step(state, batch))


def check(axis: str, form: str, remat: str = "full") -> None:
    (grads, got), (want_grads, want) = (
        learned(axis, form, None, remat),
        learned("one", "plain", form),
    )
    assert relative_error(got["loss"], want["loss"]) <= 1e-6
    assert_leaves_agree(grads, want_grads, 1e-5)
    assert min(np.abs(g).max() for g in jax.tree.leaves(grads)) > 0


@pytest.mark.parametrize(("axis", "form"), [("mesh", "int8"), ("one", "fp8")])
def test_loss_and_gradients_are_those_of_the_numbers(axis, form):
    check(axis, form)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "form", "remat"),
    [("one", "int8", "none"), ("fsdp", "int8", "full"), ("three", "fp8", "exchange"),
     ("mesh", "fp8", "full")],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_numbers_too(axis, form, remat):
    check(axis, form, remat)


def test_the_codes_make_a_difference():
    """Rounded to 8 bits the loss is another: what is compared above is no plain base."""
    rounded, plain = (learned("one", "plain", form)[1]["loss"] for form in ("int8", "plain"))
    assert 1e-6 < relative_error(rounded, plain) < 0.1


def test_a_step_holds_no_stacked_values_and_gathers_codes():
    run, step, _ = compiled("mesh", "int8")
    text, infos = step.as_text(), flat_infos(run.parts.infos)
    leaves = zip(infos, jax.tree.leaves(run.abstract.params), strict=True)
    places = jax.tree.leaves(run.shardings.params)
    coded = [(i, leaf, at) for (i, leaf), at in zip(leaves, places, strict=True)
             if leaf.dtype == jnp.int8]  # fmt: skip
    several = [c for c in coded if c[1].shape[0] * c[1].shape[1] > 1]
    assert several
    for info, leaf, where in several:
        for shape in (leaf.shape, where.shard_shape(leaf.shape)):
            dims = ",".join(map(str, shape))
            assert not re.search(rf"\b(f32|bf16)\[{dims}\]", text), info.name
        assert f"s8[{','.join(map(str, where.shard_shape(leaf.shape)))}]" in text, info.name
    gathered = re.findall(r"= \(?(\w+)\[([\d,]*)\][^ ]* all-gather(?:-start)?\(", text)
    whole = {
        ",".join(map(str, leaf.shape[2:])) for _, leaf, at in several if not at.is_fully_replicated
    }
    assert whole <= {dims for kind, dims in gathered if kind == "s8"}
    assert not {dims for kind, dims in gathered if kind in ("f32", "bf16")} & whole


def test_arguments_are_smaller_by_three_bytes_a_value():
    sizes = {f: compiled("one", f)[1].memory_analysis() for f in ("plain", "fp8")}
    params = jax.tree.leaves(program("one", "fp8").abstract.params)
    codes = sum(leaf.size for leaf in params if format_of(leaf.dtype))
    assert codes > 0
    saved = sizes["plain"].argument_size_in_bytes - sizes["fp8"].argument_size_in_bytes
    assert 2.5 * codes < saved < 3 * codes


WIDE = small("kda,dsa", 3, dim=128, kda={"decay_rank": 2})


def quantised_parts(form: str, **lora):
    cfg = LoraConfig(rank=2, targets=("q_proj",), base_format=form, **lora)
    return adapted_parts(RunConfig(model=WIDE, lora=cfg))[0]


def test_large_maps_are_codes_and_the_rest_is_as_it_was():
    plain, coded = (quantised_parts(form) for form in ("plain", "int8"))
    assert count_by_part(coded) == count_by_part(plain)
    assert matmul_params_per_token(coded) == matmul_params_per_token(plain)
    dtypes = {
        info.name.partition(".")[2].partition(".")[2]: str(leaf.dtype)
        for info, leaf in zip(flat_infos(coded.infos), jax.tree.leaves(coded.params), strict=True)
        if info.name.startswith("stack")
    }
    codes = {name for name, dtype in dtypes.items() if dtype == "int8"}
    small_ones = {"attn.k_b", "attn.v_b", "attn.decay_a", "attn.decay_b", "attn.indexer.weights"}
    assert small_ones <= dtypes.keys() and not small_ones & codes  # below a 32nd of 128 x 128
    assert codes == {
        *(f"attn.{leaf}" for leaf in ("q", "k", "v", "gate", "o", "q_a", "q_b", "kv_a")),
        "attn.indexer.k",
        *(f"ffn.{leaf}" for leaf in ("gate_up", "down", "shared.gate_up", "shared.down")),
        *(f"ffn.{leaf}" for leaf in ("latent_down", "latent_up")),
    }
    assert {n for n in dtypes if n.endswith("_scale")} == {n + "_scale" for n in codes}


def test_what_is_in_8_bits_cannot_be_trained():
    parts = quantised_parts("int8")
    cfg = TrainConfig(trainable=("*.attn.o*",))
    mask = trainable_mask(cfg, parts.infos)
    with pytest.raises(
        ConfigError, match=r"lora\.base_format keeps stack0\.run0\.attn\.o in 8 bits"
    ):
        stored_params(cfg, parts.params, parts.infos, mask)
    with pytest.raises(ConfigError, match="int8"):
        LoraConfig(base_format="int4")
    with pytest.raises(ConfigError, match=r"lora\.rank=0"):
        RunConfig(lora=LoraConfig(base_format="int8")).check(1)
