"""What a run carries from step to step, where it is stored, and how it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint.layout import named_leaves
from moejax.config import RunConfig
from moejax.layers.param import drawing_options
from moejax.lora import Selection, adapted_parts
from moejax.memory.host_state import abstract_array, place, to_device
from moejax.models.parts import ModelParts
from moejax.optim import build_optimizer, state_shardings
from moejax.partitioning import shardings_for
from moejax.train.host_update import (
    MasterState,
    copied,
    full_params,
    hosted_opt_state,
    hosted_params,
    with_masters,
    without_master,
)
from moejax.train.trainable import split, stored_params, trainable_mask


class TrainState(NamedTuple):
    """Everything that a step changes; the same tree also holds its shapes or its shardings."""

    params: dict
    opt_state: Any
    balance: dict
    step: Any  # int32 array: updates made so far


class Program(NamedTuple):
    """What stays the same for a whole run: model, optimizer, mesh, and where the state lives.

    `trains` tells for every parameter whether the run trains it; the others have no gradient and
    no optimizer state. `selection` says which maps have low-rank adapters, None without any.
    `hosted` says of every leaf of the state whether it lives in host memory.
    """

    cfg: RunConfig
    parts: ModelParts
    optimizer: optax.GradientTransformation
    mesh: Mesh
    abstract: TrainState
    shardings: TrainState
    trains: dict
    hosted: TrainState
    selection: Selection | None = None

    @property
    def has_base(self) -> bool:
        """Whether the run trains adapters, over a base that its checkpoints do not hold."""
        return self.selection is not None


def build_program(cfg: RunConfig, mesh: Mesh) -> Program:
    """Model and optimizer as data, with a sharding for every array; nothing is allocated."""
    parts, selection = adapted_parts(cfg.with_hosts(), track_max_logit=cfg.optim.qk_clip > 0)
    if selection is not None:
        cfg = cfg.replace(model=cfg.model.replace(dsa=parts.cfg.dsa))
    param_shardings = shardings_for(parts.infos, parts.params, mesh)
    trains = trainable_mask(cfg.train, parts.infos)
    params = stored_params(cfg.train, parts.params, parts.infos, trains)
    infos, trained = split(parts.infos, trains)[0], split(params, trains)[0]
    optimizer = build_optimizer(cfg.optim, cfg.train.num_steps, infos)
    abstract_opt = jax.eval_shape(optimizer.init, trained)
    params, abstract_opt = with_masters(cfg, parts.infos, trains, params, abstract_opt)
    everywhere = NamedSharding(mesh, P())
    abstract = TrainState(params, abstract_opt, parts.balance, jax.ShapeDtypeStruct((), jnp.int32))
    shardings = TrainState(
        param_shardings,
        state_shardings(abstract_opt, trained, split(param_shardings, trains)[0]),
        jax.tree.map(lambda _: everywhere, parts.balance),
        everywhere,
    )
    hosted = TrainState(
        hosted_params(cfg, parts.infos, trains),
        hosted_opt_state(cfg, abstract_opt, infos),
        jax.tree.map(lambda _: False, parts.balance),
        False,
    )
    shardings = jax.tree.map(place, shardings, hosted)
    return Program(cfg, parts, optimizer, mesh, abstract, shardings, trains, hosted, selection)


def abstract_state(program: Program) -> TrainState:
    """The state as shapes with shardings, for lowering under `jax.set_mesh` of the mesh."""
    return jax.tree.map(abstract_array, program.abstract, program.shardings, program.hosted)


def init_state(
    program: Program, seed: int, given: Mapping[str, jax.Array] | None = None
) -> TrainState:
    """A fresh state, made sharded inside jit: the same numbers on every mesh.

    Args:
      seed: of the initial weights.
      given: leaves to start from instead of fresh ones, named `params/...` and `balance/...`;
        consumed.
    """

    def build(key: jax.Array, given: dict[str, jax.Array]) -> TrainState:
        params, balance = program.parts.init(key)
        tree = {"params": params, "balance": balance}
        leaves = [given.get(name, leaf) for name, leaf in named_leaves(tree).items()]
        tree = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        params, balance = tree["params"], tree["balance"]
        params = jax.tree.map(lambda p, a: p.astype(a.dtype), params, wanted.params)
        opt_state = program.optimizer.init(to_device(split(params, program.trains)[0]))
        return TrainState(params, opt_state, balance, jnp.zeros((), jnp.int32))

    wanted = from_tree(abstract_tree(program))
    where = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    options = drawing_options(program.mesh)
    with jax.set_mesh(program.mesh):
        begin = jax.jit(build, out_shardings=where, compiler_options=options, donate_argnums=1)
        return with_copies(program, begin(jax.random.key(seed), dict(given or {})))


def with_copies(program: Program, state: TrainState) -> TrainState:
    """A state as it is saved, made one to train: with the devices' copies of master weights."""
    master, _ = without_master(program.abstract.opt_state)
    if not master:
        return state
    params, master = copied(program, state.params, master)
    return state._replace(params=params, opt_state=MasterState(master, state.opt_state))


def as_tree(state: TrainState, seed: int) -> dict:
    """The state as a checkpoint stores it: plain dicts, with the run's random key beside it."""
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return {
        "params": full_params(state),
        "opt_state": without_master(state.opt_state)[1],
        "balance": state.balance,
        "step": state.step,
        "rng": _placed_like(state.step, key),
    }


def _placed_like(step: Any, key: np.ndarray) -> Any:
    """The key where the step's number is: processes together write no array that one alone has."""
    if not isinstance(step, jax.Array):
        return key
    return jax.make_array_from_callback(key.shape, step.sharding, lambda index: key[index])


def saved_part(program: Program, tree: dict) -> dict:
    """What of such a tree a checkpoint holds: of a LoRA run the trained parameters only."""
    if not program.has_base:
        return tree
    return tree | {"params": split(tree["params"], program.trains)[0]}


def frozen_leaves(program: Program, params: dict) -> dict[str, Any]:
    """The base of a LoRA run out of its parameters (or their shapes), by name."""
    return named_leaves({"params": split(params, program.trains)[1]})


def from_tree(tree: dict) -> TrainState:
    """The state out of a checkpoint's tree; to train on, see :func:`with_copies`."""
    return TrainState(tree["params"], tree["opt_state"], tree["balance"], tree["step"])


def abstract_tree(program: Program) -> dict:
    """What a restore asks for: ShapeDtypeStructs with shardings, structured as :func:`as_tree`."""
    state = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        program.abstract,
        program.shardings,
    )
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    everywhere = NamedSharding(program.mesh, P())
    return {
        "params": full_params(state),
        "opt_state": without_master(state.opt_state)[1],
        "balance": state.balance,
        "step": state.step,
        "rng": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere),
    }
