"""Tiny checkpoints in the published formats (tests/fixtures/oracles), imported.

Their weights are random; logits, router choices, selected keys, losses and gradients were computed
by transformers and mlx-lm, see tests/fixtures/oracles/README.md.
"""

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from moejax.checkpoint.hf_source import HfSource
from moejax.config import ModelConfig
from tests.reference.weights import by_layers

FOLDER = Path(__file__).parent.parent / "fixtures" / "oracles"
NAMES = ("k3_text", "kimi_linear", "deepseek_v3", "deepseek_v32", "bailing_hybrid")


@functools.cache
def cases(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "cases.npz") as file:
        return dict(file)


@functools.cache
def source(name: str) -> HfSource:
    return HfSource(FOLDER / name)


def config(name: str) -> ModelConfig:
    """The moejax config of a checkpoint's config.json; its router's bias and indexer at rest."""
    cfg = source(name).cfg
    return cfg.replace(
        moe=cfg.moe.replace(balance="none"), dsa=cfg.dsa.replace(stage="frozen"), name=name
    )


def trees(name: str, file: str = "model") -> tuple[dict, dict]:
    """A checkpoint's (params, balance) as float32 arrays; "grads": its gradients.

    Tensors that have no gradient (the router's bias, the indexers) are zero there.
    """
    found = source(name)
    params, balance = ({}, {})
    leaves = {k: np.zeros(leaf.shape, np.float32) for k, leaf in found.map.leaves.items()}
    for key, value in load_file(FOLDER / name / f"{file}.safetensors").items():
        for piece in found.map.to_ours(key, value):
            leaves[piece.leaf][piece.at] = piece.array
    for leaf, value in leaves.items():
        *path, last = leaf.split("/")
        node = balance if leaf.endswith("router/bias") else params
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return params, balance


def weights(name: str, file: str = "model") -> dict:
    """The same, one nested dict a layer in float64, as the reference decoder reads them."""
    return by_layers(source(name).parts, *trees(name, file))
