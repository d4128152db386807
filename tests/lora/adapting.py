"""A model whose every linear map has an adapter, and its maps with the adapters folded in."""

import jax
import numpy as np

from moejax.config import LoraConfig, ModelConfig, RunConfig
from moejax.layers.adapter import AdapterSpec
from moejax.lora import adapted_parts
from moejax.models.parts import ModelParts
from tests.models.running import lively

EVERYWHERE = r".*\.(?!(wk|wq_b|weights_proj)$)[^.]*"
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def adapted(model: ModelConfig, **fields) -> ModelParts:
    """The model with adapters of rank 3 on what `fields` target."""
    return adapted_parts(RunConfig(model=model, lora=LoraConfig(rank=3, **fields)))[0]


def lively_adapters(parts: ModelParts, seed: int = 0) -> tuple[dict, dict]:
    """Parameters and balance under which every path matters, adapters among them."""
    _, base, balance = lively(parts.cfg, seed=seed)
    rng = np.random.default_rng(seed + 1)

    def fill(path, leaf):
        node = base
        for key in path:
            node = node.get(key.key) if node else None
        if node is not None:
            return node
        return (0.3 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, parts.params), balance


def merged(parts: ModelParts, params: dict) -> dict:
    """Base parameters with scale A B added in float64, by a walk of its own over the plan."""
    out = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    for s, runs in enumerate(parts.options["adapters"]):
        for r, specs in enumerate(runs):
            for spec in specs:
                _fold(out[f"stack{s}"][f"run{r}"], spec)
    return _without(out)


def _fold(layer: dict, spec: AdapterSpec) -> None:
    owner = layer
    for word in spec.owner:
        owner = owner[word]
    pair = owner["lora"][spec.name]
    a, b = pair["a"], pair["b"]
    if spec.owner[-1] == "experts":
        letters = "xyir,xyer...->xyei..." if spec.shared_a else "xyeir,xyer...->xyei..."
    else:
        letters = "xyir,xyr...->xyi..."
    delta = spec.scale * np.einsum(letters, a, b)
    at = 0
    for leaf in spec.leaves:
        if spec.at is not None:
            owner[leaf][..., spec.at, :] += delta
            continue
        width = owner[leaf].shape[-1]
        owner[leaf] += delta[..., at : at + width]
        at += width


def _without(tree: dict) -> dict:
    return {k: _without(v) if isinstance(v, dict) else v for k, v in tree.items() if k != "lora"}
