"""Decoding with caches gives the logits of the plain forward pass, and other packages' tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.layers.cache import KdaCache
from moejax.models.cache import empty_cache
from moejax.models.parts import model_parts
from tests.generate.decoding import (
    CHECKPOINTS,
    LENGTHS,
    cached_logits,
    checkpoint,
    forward_logits,
    greedy,
    rows_of,
    small,
    worst,
)
from tests.models.small_configs import small as small_config
from tests.sharded.meshes import FSDP2_EXPERT4, mesh_of

ALL = pytest.mark.parametrize("name", CHECKPOINTS)


@functools.cache
def decoded(name: str) -> np.ndarray:
    """A checkpoint's logits [B, steps, V] for prompts of `LENGTHS` in one left-padded batch."""
    model = checkpoint(name)
    return cached_logits(model, rows_of(model.parts.cfg.vocab_size, oracle=greedy(name)))


@ALL
def test_every_step_has_the_logits_of_the_row_alone(name):
    """In float64: in float32 the two programs' roundings differ with the CPU, by 2e-5."""
    model = checkpoint(name)
    rows = rows_of(model.parts.cfg.vocab_size, oracle=greedy(name))
    with jax.enable_x64(True):
        want = forward_logits(model, rows, jnp.float64)
        assert worst(cached_logits(model, rows, dtype=jnp.float64), want) <= 1e-11


@ALL
@pytest.mark.parametrize("length", [1, 5, 65])
def test_greedy_continuations_are_the_published_codes(name, length):
    """Fed the right tokens so far, every step's best token is the next one."""
    logits_TV = decoded(name)[LENGTHS.index(length)]
    np.testing.assert_array_equal(logits_TV.argmax(-1), greedy(name)[f"p{length}_tokens"])
    tolerance = 3e-4 if name == "k3_text" else 2e-4
    assert np.max(np.abs(logits_TV - greedy(name)[f"p{length}_logits"])) <= tolerance


@pytest.mark.parametrize("name", ["pair", "yarn", "warmup", "narrow"])
def test_every_kind_of_layer_decodes_as_it_reads(name):
    """In float64. Prompts shorter than the convolution and the selection, longer than a chunk."""
    model = small(name)
    rows = rows_of(model.parts.cfg.vocab_size, lengths=(1, 3, 17, 16), steps=16)
    with jax.enable_x64(True):
        want = forward_logits(model, rows, jnp.float64)
        assert worst(cached_logits(model, rows, 40, dtype=jnp.float64), want) <= 1e-11


def test_padding_leaves_no_trace():
    """What stands in it changes no bit."""
    model = small("pair")
    rows = rows_of(model.parts.cfg.vocab_size, lengths=(1, 3, 17, 16), steps=16)
    filled = cached_logits(model, rows, 40, fill=7)
    np.testing.assert_array_equal(filled, cached_logits(model, rows, 40))


def test_a_mesh_decodes_the_same():
    """Experts over four devices; one row of the eight holds no token."""
    model = small("pair")
    rows = rows_of(model.parts.cfg.vocab_size, lengths=(1, 3, 17, 16, 9, 2, 5), steps=8)
    want = cached_logits(model, rows, 32)
    rows.prompts.append(np.zeros(0, np.int32))
    padded = rows._replace(following_BT=np.pad(rows.following_BT, ((0, 1), (0, 0))))
    with jax.set_mesh(mesh_of(FSDP2_EXPERT4)):
        got = cached_logits(model, padded, 32)
    assert np.isfinite(got).all()
    assert worst(got[:7], want) <= 1e-5


@functools.cache
def compiled_step(attention: str, capacity: int):
    """The step of a model of one layer, compiled with its cache donated; and the cache's shape."""
    cfg = small_config(attention, 1, attn_res_block=0)
    parts = model_parts(cfg)

    def step(params, balance, token_B, cache):
        return parts.bind(params, balance).decode_step(token_B, cache)

    cache = jax.eval_shape(lambda: empty_cache(cfg, parts.segments, 4, capacity, jnp.float32))
    token_B = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = jax.jit(step, donate_argnums=3).lower(parts.params, parts.balance, token_B, cache)
    return lowered.compile(), cache


def cost(compiled) -> tuple[float, float, int, int]:
    """FLOPs, bytes moved, bytes of arguments and of temporaries."""
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return (
        analysis["flops"],
        analysis["bytes accessed"],
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_a_kda_step_costs_the_same_at_any_length():
    near, far = (compiled_step("kda", capacity) for capacity in (128, 1024))
    assert cost(near[0]) == cost(far[0])
    assert nbytes(near[1]) == nbytes(far[1])
    assert all(isinstance(run, KdaCache) for stack in far[1].layers for run in stack)
    # The measure sees what does grow: rows of an MLA layer.
    near, far = (compiled_step("mla", capacity) for capacity in (128, 1024))
    assert all(a < b for a, b in zip(cost(near[0])[:3], cost(far[0])[:3], strict=True))


@pytest.mark.parametrize("attention", ["kda", "mla", "dsa"])
def test_a_donated_cache_is_written_in_place(attention):
    step, cache = compiled_step(attention, 1024)
    assert step.memory_analysis().alias_size_in_bytes >= nbytes(cache)


def test_a_step_keeps_the_shapes_and_types_of_its_cache():
    """So one program serves every step, and float32 states stay float32."""
    cfg, dtype = small_config("kda,mla,dsa", 3, mla={"rope": "half"}), jnp.dtype("bfloat16")
    parts = model_parts(cfg)

    def both(params, balance, tokens_BT, lengths_B, cache):
        model = parts.bind(params, balance)
        _, cache = model.prefill(tokens_BT, lengths_B, cache, dtype=dtype)
        logits_BV, after = model.decode_step(tokens_BT[:, 0], cache, dtype=dtype)
        return logits_BV, cache, after

    cache = jax.eval_shape(lambda: empty_cache(cfg, parts.segments, 2, 10, dtype))
    tokens_BT, lengths_B = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 5), (2,)))
    logits_BV, *after = jax.eval_shape(
        both, parts.params, parts.balance, tokens_BT, lengths_B, cache
    )
    assert after == [cache, cache]
    assert (logits_BV.shape, logits_BV.dtype) == ((2, cfg.vocab_size), jnp.float32)


def test_rows_have_the_size_of_their_kind():
    cfg = small_config("kda,mla,dsa", 3)
    cache = jax.eval_shape(lambda: empty_cache(cfg, model_parts(cfg).segments, 2, 10, jnp.bfloat16))
    shapes = [
        jax.tree.map(lambda a: (a.shape[2:], str(a.dtype)), r) for s in cache.layers for r in s
    ]
    assert shapes == [
        (((2, 2, 8, 12), "float32"), *[((2, 3, w), "bfloat16") for w in (16, 16, 24)]),
        (((2, 10, 14), "bfloat16"), ((2, 10, 4), "bfloat16")),
        (((2, 10, 14), "bfloat16"), ((2, 10, 4), "bfloat16"), ((2, 10, 6), "bfloat16")),
    ]
    assert cache.capacity == 10
