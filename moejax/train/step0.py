"""Loss of a randomly initialised model before its first step, beside what arithmetic says.

Logits of a hidden vector h (root mean square 1 after the last norm) under a head of standard
deviation s are normal with variance |h|² s² = D s², so the loss of labels that know nothing is

    ln Σ_v exp(l_v) - E[l] = ln V + D s² / 2

whatever the layers before are and whatever text is read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import ConfigError, RunConfig
from moejax.config.load import load_config
from moejax.layers.embed import Embed
from moejax.models.parts import model_parts

VOCABULARY = 163_840
K3_WIDTH = 7168
WIDTHS = (896, 1792, 3584, 7168)
# The head is drawn and used in so many parts, each the size of the input table: a whole one of
# K3's width takes 4.7 GB.
_PARTS = 16


@dataclasses.dataclass(frozen=True)
class Step0:
    """A model before its first step; losses in nats per token.

    Attributes:
      width, std, vocabulary: D, s, V.
      predicted: ln V + D s² / 2.
      measured: mean over tokens and over every label, as if labels were drawn without end.
      drawn: mean over tokens of one random label each.
      error: standard error of `drawn` about `measured`, sqrt(D s² / tokens).
      parameters: of the layers, tables aside.
    """

    width: int
    std: float
    vocabulary: int
    predicted: float
    measured: float
    drawn: float
    error: float
    parameters: int


def predicted_loss(vocabulary: int, width: int, std: float) -> float:
    """ln V + D s² / 2."""
    return math.log(vocabulary) + width * std**2 / 2


def k3_shaped(width: int, vocabulary: int = VOCABULARY) -> RunConfig:
    """Two layers of K3.1, KDA and MLA with its indexer, at another width.

    Heads keep their widths and grow in number with D, as do latents and experts; a layer has four
    experts, of which a token uses two.

    Raises:
      ConfigError: a width that the scale does not keep whole.
    """
    if width < 64 or width % 64 or vocabulary % _PARTS:
        raise ConfigError(
            f"width {width} with vocabulary {vocabulary} is not allowed: the width must be a "
            f"multiple of 64, the vocabulary one of {_PARTS}."
        )

    def scaled(size: int, least: int = 16) -> int:
        return max(round(size * width / K3_WIDTH / 16) * 16, least)

    heads = max(round(96 * width / K3_WIDTH), 1)
    changes = {
        "model.dim": width, "model.num_layers": 2, "model.vocab_size": vocabulary // _PARTS,
        "model.kda.num_heads": heads, "model.mla.num_heads": heads,
        "model.mla.q_latent": scaled(1536), "model.mla.kv_latent": scaled(512),
        "model.ffn.num_dense_layers": 0, "model.moe.num_experts": 4, "model.moe.top_k": 2,
        "model.moe.expert_dim": scaled(3072), "model.moe.latent_dim": scaled(3584),
        "mesh.expert": 1, "train.compute_dtype": "float32", "train.remat": "none",
    }  # fmt: skip
    return load_config("kimi_k31", {name: str(value) for name, value in changes.items()})


def measure(width: int, *, tokens: int = 256, vocabulary: int = VOCABULARY, seed: int = 0) -> Step0:
    """Initialises a model of this width as any run does, and takes its loss on random tokens.

    Args:
      width: D.
      tokens: of one row; each has one random label.
      vocabulary: V; the input table holds a sixteenth of it, and tokens are drawn from those.
      seed: of weights, tokens and labels.
    """
    cfg = k3_shaped(width, vocabulary).model
    parts = model_parts(cfg)
    weights, ids, labels, head = jax.random.split(jax.random.key(seed), 4)
    tokens_BT = jax.random.randint(ids, (1, tokens), 0, cfg.vocab_size)
    hidden_TD = _hidden(parts, weights, tokens_BT)
    labels_T = jax.random.randint(labels, (tokens,), 0, vocabulary)
    means = _losses(hidden_TD, labels_T, jax.random.split(head, _PARTS), cfg.vocab_size, cfg)
    layers = {name: tree for name, tree in parts.params.items() if name not in ("embed", "head")}
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layers))
    return Step0(
        width, cfg.init_std, vocabulary, predicted_loss(vocabulary, width, cfg.init_std), *means,
        math.sqrt(width * cfg.init_std**2 / tokens), size,
    )  # fmt: skip


def _hidden(parts: Any, key: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Hidden states [T, D] of a freshly drawn model; its weights are gone afterwards."""
    options = {"xla_backend_optimization_level": 0}  # drawing is all compile time otherwise
    params, balance = jax.jit(parts.init, compiler_options=options)(key)

    @jax.jit
    def run(params, balance, tokens_BT):
        return parts.bind(params, balance)(tokens_BT)[0][0]

    return run(params, balance, tokens_BT)


def _losses(
    hidden_TD: jax.Array, labels_T: jax.Array, keys: jax.Array, rows: int, cfg: Any
) -> tuple[float, float]:
    """Loss over every label, and of the drawn ones, with a head drawn part by part.

    The parts are what the model draws for a table of as many rows: V independent rows in all.
    """

    @jax.jit
    def part(key, first, hidden_TD, labels_T):
        table = Embed(rows, cfg.dim, cfg.init_std, nnx.Rngs(params=key)).table[...]
        logits_TV = jnp.einsum("td,vd->tv", hidden_TD, table, preferred_element_type=jnp.float32)
        here_T = (labels_T >= first) & (labels_T < first + rows)
        place_T = jnp.where(here_T, labels_T - first, 0)
        picked_T = jnp.take_along_axis(logits_TV, place_T[:, None], 1)[:, 0]
        lse_T = jax.nn.logsumexp(logits_TV, axis=-1)
        return lse_T, jnp.mean(logits_TV, -1), jnp.where(here_T, picked_T, 0)

    found = [part(key, i * rows, hidden_TD, labels_T) for i, key in enumerate(keys)]
    lse_PT, mean_PT, picked_PT = map(jnp.stack, zip(*found, strict=True))
    lse_T = jax.nn.logsumexp(lse_PT, axis=0)
    every = jnp.mean(lse_T - jnp.mean(mean_PT, 0))
    return float(every), float(jnp.mean(lse_T - jnp.sum(picked_PT, 0)))
