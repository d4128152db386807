"""`moejax.load(PATH)`: a checkpoint, a training workdir or a Hugging Face folder as a model."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint import Checkpoints, has_part, locate, read_config
from moejax.checkpoint.base import read_model
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import named_leaves, steps_in
from moejax.checkpoint.weights import is_hf_folder
from moejax.config import MeshConfig, RunConfig
from moejax.config.load import as_run_config
from moejax.data import ByteTokenizer, Tokenizer, load_tokenizer
from moejax.generate.model import LanguageModel
from moejax.layers.param import is_kept_float32
from moejax.layers.quantised import is_coded
from moejax.lora import adapted_parts
from moejax.models.parts import ModelParts
from moejax.optim import build_optimizer, ema_params, state_shardings
from moejax.partitioning import make_mesh, shardings_for
from moejax.typing import PyTree

_TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | MeshConfig | None = None,
    dtype: Any = "float32",
    compute_dtype: Any = "float32",
    allow: Collection[str] = (),
    base: str | os.PathLike[str] = "",
) -> LanguageModel:
    """A model with its weights and tokenizer.

    Of a run that kept a moving average of its weights, the average.

    Args:
      path: a training workdir (its newest checkpoint), one checkpoint, what `moejax import-hf`
        made, or a Hugging Face folder, whose tensors are read straight into each device's share.
      mesh: devices; None puts all of them along `fsdp`.
      dtype: of the weights in memory; the few that must be float32 are.
      compute_dtype: of the layers.
      allow: names of tensors in a Hugging Face folder that may be there unused.
      base: of a LoRA run: where its base lies, if no longer at the run's `init_from`.
    Raises:
      ConfigError: nothing there that can be read; the line says why.
    """
    if mesh is None or isinstance(mesh, MeshConfig):
        mesh = make_mesh(mesh or MeshConfig())
    path = pathlib.Path(path).expanduser().absolute()
    if is_hf_folder(path):
        source = HfSource(path, allow_unexpected=allow)
        parts, tokenizer = source.parts, _tokenizer_in(path)
        params, balance = (source.load(tree) for tree in _abstract(parts, mesh, dtype))
    else:
        directory, step = locate(path)
        where = directory / str(steps_in(directory)[-1] if step is None else step)
        cfg = as_run_config(read_config(where), {"init_from": os.fspath(base)} if base else None)
        parts, tokenizer = adapted_parts(cfg)[0], _tokenizer(cfg, directory.parent)
        params, balance = _restore(where, cfg, parts, mesh, dtype)
    return LanguageModel(
        parts, params, balance, mesh, tokenizer=tokenizer, compute_dtype=compute_dtype
    )


def _restore(
    where: pathlib.Path, cfg: RunConfig, parts: ModelParts, mesh: Mesh, dtype: Any
) -> tuple[PyTree, PyTree]:
    params, balance = _abstract(parts, mesh, dtype)
    if not (cfg.optim.ema_decay and has_part(where, "opt_state")):
        arrays = read_model(cfg, where, parts, {"params": params, "balance": balance})
        return arrays["params"], arrays["balance"]
    optimizer = build_optimizer(cfg.optim, cfg.train.num_steps, parts.infos)
    state = jax.eval_shape(optimizer.init, parts.params)
    shardings = state_shardings(state, parts.params, jax.tree.map(lambda a: a.sharding, params))
    wanted = {"params": params, "balance": balance, "opt_state": _placed(state, shardings)}
    arrays = Checkpoints.restore_parts(where, wanted)
    average = ema_params(arrays["opt_state"])
    return jax.tree.map(lambda a, b: a.astype(b.dtype), average, params), arrays["balance"]


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(
        lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree, shardings
    )


def _abstract(parts: ModelParts, mesh: Mesh, dtype: Any) -> tuple[PyTree, PyTree]:
    """Shapes, types and shardings of the parameters and the balancing state."""
    leaves = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype if _is_kept(name, leaf) else jnp.dtype(dtype),
        )
        for name, leaf in named_leaves(parts.params).items()
    ]
    params = jax.tree.unflatten(jax.tree.structure(parts.params), leaves)
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), parts.balance)
    return (
        _placed(params, shardings_for(parts.infos, parts.params, mesh)),
        _placed(parts.balance, everywhere),
    )


def _is_kept(name: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf has its own type whatever the others have; codes are no numbers."""
    return is_coded(name, leaf.dtype) or is_kept_float32(name.replace("/", "."))


def _tokenizer(cfg: RunConfig, workdir: pathlib.Path) -> Tokenizer | None:
    """The run's own tokenizer: in its workdir, or where its config says."""
    if cfg.data.tokenizer == "byte":
        return ByteTokenizer()
    return _tokenizer_in(workdir if cfg.data.tokenizer == "bpe" else workdir / cfg.data.tokenizer)


def _tokenizer_in(path: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a folder or file; None where there is none."""
    there = path.is_file() or any((path / name).is_file() for name in _TOKENIZER_FILES)
    return load_tokenizer(path) if there else None
