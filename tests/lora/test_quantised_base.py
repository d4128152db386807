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

PACKED = {"latent_dim": 32, "expert_dim": 32, "top_k": 2, "expert_format": "mxfp4"}
ONE_SCAN = small(
    "kda", 2, norm_eps=1e-2, moe=PACKED, ffn={"num_dense_layers": 0}, kda={"conv_size": 3}
)  # fmt: skip
BOTH = small("kda,dsa,dsa", 3, norm_eps=1e-2, moe=PACKED)
LORA = {"targets": ("q_proj", "o_proj", "gate_proj"), "target_parameters": EXPERTS[:1]}
LORA |= {"rank": 3, "alpha": 2.0}
pack = jax.jit(mxfp4.encode)
MESHES = {
    "one": ONE, "mesh": FSDP2_EXPERT4, "fsdp": FSDP8, "three": DATA2_FSDP2_EXPERT2
}  # fmt: skip


def encoded(value: np.ndarray, form: str, in_axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales by another way: float64, and NumPy's own rounding to E4M3."""
    amax = np.abs(value.astype(np.float64)).max(in_axis, keepdims=True)
    amax = np.maximum(amax, 2.0**-100)
    if form == "int8":
        step = 2.0 ** (np.floor(np.log2(amax / 127)) - 7)  # the last of 8 bits of mantissa
        scale = np.ceil(amax / 127 / step) * step
        codes = np.round(value / scale).astype(np.int8)
    else:
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        codes = (value / scale).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale.squeeze(in_axis).astype(np.float32)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_the_nearest(form):
    rng = np.random.default_rng(0)
    value = rng.standard_normal((96, 3, 40)) * 10.0 ** rng.integers(-12, 3, (3, 40))
    value = value.astype(np.float32)
    value[:, 0, :2] = 0
    value[:4, 0, 1] = 127, 0.5, 1.5, -2.5  # ties, with a scale of 1
    codes, scale = map(np.asarray, jax.jit(lambda value: encode(value, form))(value))
    want, want_scale = encoded(value, form)
    np.testing.assert_array_equal(codes.view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(scale[0, 1:], want_scale[0, 1:])
    assert np.all(scale == scale.astype(ml_dtypes.bfloat16).astype(np.float32))
    turned = encode(jnp.asarray(value).transpose(1, 0, 2), form, 1)[0]  # op by op
    np.testing.assert_array_equal(codes.view(np.uint8), turned.transpose(1, 0, 2).view(np.uint8))
    back = np.asarray(jax.jit(lambda *a: decode(*a, jnp.float32))(codes, scale), np.float64)
    nearest = {"int8": 0.5 * scale, "fp8": np.maximum(2.0**-4 * np.abs(value), 2.0**-10 * scale)}
    assert np.all(np.abs(back - value) <= nearest[form])
    assert np.abs(back - value).max() > 0


@functools.cache
def program(axis: str, form: str, model: ModelConfig, remat: str = "full"):
    return program_on(MESHES[axis], model=model, lora=LORA | {"base_format": form}, remat=remat)


@functools.cache
def start(form: str, model: ModelConfig, stands_for: str | None = None):
    """Weights of a run in this form; plain ones may be what the codes of another stand for."""
    plain = model.replace(moe=model.moe.replace(expert_format="plain"))
    params, balance = lively_adapters(program("one", "plain", plain).parts)
    params = jax.tree_util.tree_map_with_path(calmer, params)
    coded = program("one", stands_for or form, model).abstract.params

    def walk(node: dict, like: dict) -> dict:
        out = {}
        for name, value in node.items():
            if isinstance(value, dict):
                out[name] = walk(value, like[name])
            elif like[name].dtype == jnp.uint8:
                pair = pack(jnp.asarray(0.1 * value).reshape(*value.shape[:4], -1))
                for end, part in zip(("", "_scales"), pair, strict=True):
                    out[name + end] = np.asarray(part).reshape(*part.shape[:4], *value.shape[4:])
            elif which := format_of(like[name].dtype):
                codes, scale = encoded(value, which, 2)
                if form == "plain":
                    out[name] = codes.astype(np.float32) * np.expand_dims(scale, 2)
                else:
                    out |= {name: codes, scale_name(name): scale}
            else:
                out[name] = value
        return out

    return walk(params, coded), balance


@functools.cache
def compiled(axis: str, form: str, model: ModelConfig, remat: str):
    run = program(axis, form, model, remat)
    batch = batch_of(run, 1)
    with jax.set_mesh(run.mesh), jax.default_matmul_precision("highest"):
        state = jax.device_put(begun(run, *start(form, model)), run.shardings)
        step = jax.jit(lambda s, b: gradients(run, s, b), compiler_options=FAST_COMPILE)
        return run, step.lower(state, batch).compile(), batch


def learned(axis: str, form: str, model: ModelConfig, remat: str, stands_for: str | None = None):
    """Gradients, and what was measured."""
    run, step, batch = compiled(axis, form, model, remat)
    state = jax.device_put(begun(run, *start(form, model, stands_for)), run.shardings)
    return jax.tree.map(np.asarray, step(state, batch))


def check(axis: str, form: str, model: ModelConfig, remat: str) -> None:
    grads, got = learned(axis, form, model, remat)
    want_grads, want = learned("one", "plain", model, "none", form)
    assert relative_error(got["loss"], want["loss"]) <= 1e-6
    assert_leaves_agree(grads, want_grads, 1e-5)
    assert min(np.abs(g).max() for g in jax.tree.leaves(grads)) > 0


def test_loss_and_gradients_are_those_of_the_numbers():
    check("mesh", "int8", ONE_SCAN, "full")
    rounded, plain = (
        learned("one", "plain", ONE_SCAN, "none", form)[1]["loss"] for form in ("int8", "plain")
    )
    assert 1e-6 < relative_error(rounded, plain) < 0.1  # the codes do make a difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "form", "remat"),
    [("one", "int8", "none"), ("one", "fp8", "full"), ("fsdp", "int8", "full"),
     ("three", "fp8", "exchange"), ("mesh", "int8", "full"), ("mesh", "fp8", "full")],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_numbers_too(axis, form, remat):
    check(axis, form, BOTH, remat)


@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_step_holds_no_stacked_values_and_gathers_codes(form):
    run, step, _ = compiled("mesh", form, ONE_SCAN, "full")
    text, stored = step.as_text(), {"int8": "s8", "fp8": "f8e4m3fn"}[form]
    wire = {"int8": "s8", "fp8": "u8"}[form]
    trees = run.parts.infos, run.abstract.params, run.shardings.params
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    coded = [(i.name, leaf, at) for i, leaf, at in leaves if format_of(leaf.dtype) == form]
    assert coded and all(leaf.shape[0] * leaf.shape[1] > 1 for _, leaf, _ in coded)
    for name, leaf, where in coded:
        for shape in (leaf.shape, where.shard_shape(leaf.shape)):
            dims = ",".join(map(str, shape))
            assert not re.search(rf"\b(f32|f16|bf16)\[{dims}\]", text), name
        assert f"{stored}[{dims}]" in text, name
    gathered = re.findall(r"= \(?(\w+)\[(?:1,1,)?([\d,]*)\][^ ]* all-gather(?:-start)?\(", text)
    split = [leaf for _, leaf, where in coded if not where.is_fully_replicated]
    whole = {",".join(map(str, leaf.shape[2:])) for leaf in split}
    assert len(whole) > 5 and whole <= {dims for kind, dims in gathered if kind == wire}
    assert not {dims for kind, dims in gathered if kind != wire} & whole


def test_arguments_of_a_step_are_a_byte_a_value():
    run, step, _ = compiled("mesh", "int8", ONE_SCAN, "full")
    leaves, places = (jax.tree.leaves(t.params) for t in (run.abstract, run.shardings))
    held = step.memory_analysis().argument_size_in_bytes
    sizes = [int(np.prod(at.shard_shape(a.shape))) for a, at in zip(leaves, places, strict=True)]
    stored = sum(n * a.dtype.itemsize for n, a in zip(sizes, leaves, strict=True))
    codes = sum(n for n, a in zip(sizes, leaves, strict=True) if a.dtype == jnp.int8)
    assert codes > 2048 and held < stored + 2048  # what is not parameters is less than that


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
