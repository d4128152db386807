"""The first tensor that is not finite is named where it arises, not where it arrives."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from moejax.config.load import load_config
from moejax.models.parts import flat_infos
from moejax.partitioning import make_mesh
from moejax.train import diagnose
from moejax.train.diagnose import first_bad_tensor
from moejax.train.evaluate import put_batch
from moejax.train.state import build_program, init_state
from tests.cli.conftest import SMALL


@pytest.fixture(scope="module")
def trained():
    """A program of three layers, its state, and one batch in two microbatches."""
    cfg = load_config(
        "tiny",
        SMALL | {"model.num_layers": 3, "model.ffn.num_dense_layers": 3, "data.batch_size": 16,
                 "train.accumulation": 2},
    )  # fmt: skip
    program = build_program(cfg, make_mesh(cfg.mesh))
    tokens = np.random.default_rng(0).integers(0, 256, (16, 32), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "segment_ids": np.ones_like(tokens)}
    return program, init_state(program, 0), put_batch(program, batch, 2)


@pytest.mark.parametrize(
    ("part", "layer", "value", "says"),
    [
        (".ffn.", 1, 3e38, "output of the feed-forward part of layer 1 (dense)"),
        (".attn.", 2, 3e38, "output of the attention of layer 2 (mla)"),
        ("final_norm", ..., 3e38, "the loss itself, after layers that are finite"),
        (".ffn.", 1, np.nan, "parameter stack0.run0.ffn."),
    ],
)
def test_the_first_tensor_is_named(trained, monkeypatch, part, layer, value, says):
    """Weights so large that their products are infinite, in one layer of three."""
    program, state, batch = trained
    names = iter([info.name for info in flat_infos(program.parts.infos)])

    def spoil(leaf):
        if part not in next(names):
            return leaf
        layers = leaf if layer is ... else leaf.reshape(-1, *leaf.shape[2:])
        return layers.at[layer].set(value).reshape(leaf.shape)

    with jax.set_mesh(program.mesh):
        params = jax.tree.map(spoil, state.params)
    options = {"xla_backend_optimization_level": 0}  # compiles in a third of the time
    monkeypatch.setattr(diagnose.jax, "jit", partial(jax.jit, compiler_options=options))
    assert first_bad_tensor(program, state._replace(params=params), batch).startswith(says)
