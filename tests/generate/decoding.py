"""Cached decoding with given tokens, and the plain forward pass it must equal."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.generate import Buckets, LanguageModel
from moejax.models.cache import empty_cache
from moejax.models.parts import ModelParts, model_parts
from moejax.partitioning import shardings_for
from tests.models import published
from tests.models.running import FAST_COMPILE, lively
from tests.models.small_configs import CONFIGS
from tests.models.small_configs import small as small_config
from tests.sharded.meshes import mesh_of

GREEDY = published.FOLDER.parent / "generate"
CHECKPOINTS = ("kimi_linear", "deepseek_v3", "deepseek_v32", "k3_text")
LENGTHS = (1, 5, 65, 63, 64)  # the first three have an oracle
STEPS = 40
OWN = {
    "pair": small_config("kda,dsa", 2, ffn={"num_dense_layers": 0}),
    "dense": small_config("kda,mla", 2, ffn={"num_dense_layers": 2}, attn_res_block=0),
    "moe": small_config("mla", 1, ffn={"num_dense_layers": 0}, attn_res_block=0),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Parts and arrays of a model."""

    parts: ModelParts
    params: dict
    balance: dict

    def on(self, sizes: dict[str, int], buckets: Buckets | None = None) -> LanguageModel:
        """The model on a mesh."""
        mesh = mesh_of(sizes)
        shardings = shardings_for(self.parts.infos, self.parts.params, mesh)
        params = jax.device_put(self.params, shardings)
        balance = jax.device_put(self.balance, NamedSharding(mesh, P()))
        model = LanguageModel(self.parts, params, balance, mesh)
        model.generator.buckets = buckets or Buckets()
        model.generator.compiler_options = FAST_COMPILE
        return model


class Rows(NamedTuple):
    """Prompts and the tokens that follow them, which decoding is fed whatever it would choose."""

    prompts: list[np.ndarray]
    following_BT: np.ndarray


@functools.cache
def checkpoint(name: str) -> Model:
    """A tiny checkpoint in a published format."""
    parts = model_parts(published.config(name))
    return Model(parts, *published.trees(name))


@functools.cache
def small(name: str) -> Model:
    """A small config with weights that make every path matter."""
    return Model(*lively(OWN[name] if name in OWN else CONFIGS[name]))


@functools.cache
def greedy(name: str) -> dict[str, np.ndarray]:
    """Continuations by other packages."""
    with np.load(GREEDY / name / "cases.npz") as file:
        return dict(file)


def rows_of(vocab_size: int, lengths=LENGTHS, steps=STEPS, oracle: dict | None = None) -> Rows:
    """Random prompts of these lengths and random followers, or an oracle's where it has them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in lengths]
    following = rng.integers(0, vocab_size, (len(lengths), steps)).astype(np.int32)
    for row, n in enumerate(lengths):
        if oracle and f"p{n}_prompt" in oracle:
            prompts[row] = oracle[f"p{n}_prompt"].astype(np.int32)
            following[row] = oracle[f"p{n}_tokens"][:steps]
    return Rows(prompts, following)


def forward_logits(model: Model, rows: Rows, dtype=jnp.float32) -> np.ndarray:
    """[B, steps, V] from one pass over each row alone: no cache, no padding in front."""
    B, steps = rows.following_BT.shape
    length = max(map(len, rows.prompts)) + steps
    tokens_BT, segments_BT = np.zeros((2, B, length), np.int32)
    for row, (prompt, following) in enumerate(zip(*rows, strict=True)):
        whole = np.concatenate([prompt, following])
        tokens_BT[row, : len(whole)], segments_BT[row, : len(whole)] = whole, 1

    def run(params, balance, tokens_BT, segments_BT):
        module = model.parts.bind(params, balance)
        return module.logits(module(tokens_BT, segments_BT, dtype=dtype)[0])

    with jax.default_matmul_precision("highest"):
        logits = jax.jit(run, compiler_options=FAST_COMPILE)(
            model.params, model.balance, jnp.asarray(tokens_BT), jnp.asarray(segments_BT)
        )
    starts = [len(prompt) - 1 for prompt in rows.prompts]
    return np.stack([np.asarray(logits[b, s : s + steps]) for b, s in enumerate(starts)])


def cached_logits(
    model: Model, rows: Rows, capacity: int = 128, *, fill: int = 0, dtype=jnp.float32
) -> np.ndarray:
    """[B, steps, V] from one prefill of the left-padded prompts and a step a token.

    Args:
      fill: what stands in the padding.
    """
    tokens_BT = np.full((len(rows.prompts), max(map(len, rows.prompts))), fill, np.int32)
    for row, prompt in enumerate(rows.prompts):
        tokens_BT[row, tokens_BT.shape[1] - len(prompt) :] = prompt
    lengths_B = np.array([len(prompt) for prompt in rows.prompts], np.int32)
    arrays = (tokens_BT, lengths_B, rows.following_BT)
    with jax.default_matmul_precision("highest"):
        run = _program(model, dtype)
        return np.asarray(run(model.params, model.balance, *map(jnp.asarray, arrays), capacity))


@functools.cache
def _program(model: Model, dtype):
    parts = model.parts

    def run(params, balance, tokens_BT, lengths_B, following_BT, capacity):
        cache = empty_cache(parts.cfg, parts.segments, len(tokens_BT), capacity, dtype)
        first_BV, cache = parts.bind(params, balance).prefill(
            tokens_BT, lengths_B, cache, dtype=dtype
        )

        def step(cache, token_B):
            logits_BV, cache = parts.bind(params, balance).decode_step(token_B, cache, dtype=dtype)
            return cache, logits_BV

        _, rest = jax.lax.scan(step, cache, following_BT[:, :-1].T)
        return jnp.concatenate([first_BV[None], rest]).swapaxes(0, 1)

    return jax.jit(run, static_argnums=5, compiler_options=FAST_COMPILE)


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
