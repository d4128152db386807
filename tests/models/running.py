"""Running a decoder in tests: one compiled function for logits, losses, gradients and choices."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import ModelConfig
from moejax.data.packing import next_token_labels
from moejax.layers.dsa import Dsa
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.models.decoder import by_layer
from moejax.models.parts import ModelParts, model_parts
from moejax.partitioning import BATCH_AXES, shardings_for
from pallas_kernels.lightning_indexer import lightning_indexer

# Programs here run once or a few times, so compiling fast counts more than running fast.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


class Run(NamedTuple):
    """What one pass over rows gives; the loss is the sum of cross entropies of each row."""

    logits_BTV: np.ndarray
    loss_B: np.ndarray
    measured: dict[str, np.ndarray]  # auxiliary values, layers first
    grads: tuple | None  # of the objective, (params,)


@contextlib.contextmanager
def recorded_choices() -> Iterator[None]:
    """Inside, a decoder also measures `ids`, a token's experts, and `picks`, a query's keys."""
    balance_aux, attend = LatentMoe._balance_aux, Dsa.attend

    def with_ids(self, ids_BTA, *args):
        return {**balance_aux(self, ids_BTA, *args), "ids": ids_BTA}

    def with_picks(self, x_BTD, parts, segment_ids_BT, drop=None):
        out, aux = attend(self, x_BTD, parts, segment_ids_BT, drop)
        index = self.indexer(x_BTD, parts.q_latent_BTQ)
        picks = lightning_indexer(*index, top_k=self.dsa.top_k, segment_ids=segment_ids_BT)
        return out, {**aux, "picks": picks}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentMoe, "_balance_aux", with_ids)
        patch.setattr(Dsa, "attend", with_picks)
        yield


def plain_cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """Summed over the labels of each row that count, [B]."""
    log_p = jax.nn.log_softmax(logits_BTV)
    picked = jnp.take_along_axis(log_p, jnp.maximum(labels_BT, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(labels_BT >= 0, picked, 0), axis=1)


def forward(parts: ModelParts, params, balance, rows: dict, dtype=jnp.float32, **options):
    """(logits, loss a row, measured values by layer); to be traced."""
    model = parts.bind(params, balance)
    hidden, aux = model(rows["tokens"], rows["segment_ids"], dtype=dtype, **options)
    logits = model.logits(hidden)
    names = sorted({name for runs in aux for run in runs for name in run})
    measured = {name: by_layer(aux, parts.segments, name) for name in names}
    return logits, plain_cross_entropy(logits, rows["labels"]), measured


def run(
    parts: ModelParts, params, balance, rows: dict, *, loss_weight_B=None, dtype=jnp.float32,
    mesh: Mesh | None = None,
) -> Run:  # fmt: skip
    """One compiled pass; with `loss_weight_B` also the gradient of the losses' weighted sum.

    On a mesh, weights and rows are laid out as in training.
    """

    def objective(params, balance, rows):
        logits, loss_B, measured = forward(parts, params, balance, rows, dtype)
        total = (
            loss_B.sum() if loss_weight_B is None else jnp.sum(loss_B * jnp.asarray(loss_weight_B))
        )
        return total, (logits, loss_B, measured)

    fn = objective if loss_weight_B is None else jax.value_and_grad(objective, has_aux=True)
    if mesh is not None:
        params = jax.device_put(params, shardings_for(parts.infos, parts.params, mesh))
        rows = jax.device_put(rows, NamedSharding(mesh, P(BATCH_AXES)))
    context = jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()
    with context, jax.default_matmul_precision("highest"), recorded_choices():
        out = jax.jit(fn, compiler_options=FAST_COMPILE)(params, balance, rows)
    if loss_weight_B is None:
        (_, rest), grads = out, None
    else:
        (_, rest), grads = out
    logits, loss_B, measured = jax.tree.map(np.asarray, rest)
    return Run(logits, loss_B, measured, grads)


def row_of(documents: list[np.ndarray], seq_len: int) -> dict[str, np.ndarray]:
    """One row [T] with these documents at its end, padded in front."""
    padding = seq_len - sum(map(len, documents))
    assert padding >= 0
    tokens = np.concatenate([np.zeros(padding, np.int32), *documents]).astype(np.int32)
    lengths = [padding, *map(len, documents)]
    segment_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "labels": next_token_labels(tokens, segment_ids),
    }


def stack_rows(rows: list[dict]) -> dict[str, np.ndarray]:
    """Rows of one length as a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def filled(build: Callable[[], nnx.Module], std: float, seed: int) -> nnx.Module:
    """The module `build` makes, with normal maps, norms of 1 and biases of 0 drawn by NumPy.

    Its own initial values would cost a compilation for each shape.
    """
    graph, state = nnx.split(nnx.eval_shape(build))
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        name = [getattr(part, "key", None) for part in path if hasattr(part, "key")][-1]
        if leaf.ndim == 1:
            return np.zeros(leaf.shape, np.float32) + (name not in ("bias", "a_log", "k_norm_bias"))
        return (std * rng.standard_normal(leaf.shape)).astype(np.float32)

    arrays = jax.tree_util.tree_map_with_path(value, nnx.to_pure_dict(state))
    return nnx.merge(graph, jax.tree.map(jnp.asarray, arrays))


def lively(cfg: ModelConfig, seed: int = 0) -> tuple[ModelParts, dict, dict]:
    """A model whose every path matters: large weights, biases and depth queries that are not 0."""
    parts = model_parts(cfg, track_max_logit=True)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        fresh = rng.standard_normal(leaf.shape)
        if name in ("weight", "norm", "k_norm", "o_norm") and path[-2].key != "router":
            return 1 + 0.3 * fresh  # norm weights
        if name in ("query", "k_norm_bias", "a_log", "dt_bias"):
            return 0.5 * fresh
        if name == "bias":
            return 0.1 * fresh
        if name.endswith("_conv"):
            return 0.6 * fresh
        if name == "table":
            return fresh * (1.0 if path[0].key == "embed" else 0.3)
        fan_in = {"q": -3, "k": -3, "v": -3, "q_b": -3, "k_b": -3, "v_b": -3, "gate_up": -3}.get(
            name, -2
        )
        fan_in = -2 if path[-2].key == "indexer" else fan_in
        return 1.5 * fresh / np.sqrt(leaf.shape[fan_in])

    make = lambda tree: jax.tree_util.tree_map_with_path(fill, tree)  # noqa: E731
    params, balance = (
        jax.tree.map(lambda a: a.astype(np.float32), make(t)) for t in (parts.params, parts.balance)
    )
    return parts, params, balance
