"""What of a run's state is in host memory, and the update of such a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config import RunConfig
from moejax.layers.param import is_kept_float32
from moejax.memory.host_state import update_layers
from moejax.optim.streamed import Finish, flat, nested, streamed_update, tail_in
from moejax.partitioning import ParamInfo
from moejax.train.trainable import split

if TYPE_CHECKING:
    from moejax.train.state import Program, TrainState


class MasterState(NamedTuple):
    """Optimizer state of a run whose devices hold trained maps in the compute dtype.

    Attributes:
      master: those maps in float32, in host memory; what is updated and saved.
      inner: the optimizer's own.
    """

    master: dict
    inner: Any


def _is_large(info: ParamInfo) -> bool:
    """Whether a parameter is a map or table; vectors are not worth their copies."""
    return info.num_dims >= 2


def has_master(cfg: RunConfig, info: ParamInfo, trained: bool) -> bool:
    """Whether a parameter's float32 values are kept apart from what the devices compute with.

    Routers are not: they compute in float32 whatever the rest does.
    """
    wide = is_kept_float32(info.name) or ".router." in info.name
    return cfg.memory.master == "host" and trained and _is_large(info) and not wide


def hosted_params(cfg: RunConfig, infos: dict, trains: dict) -> dict:
    """True for every parameter that lives in host memory: frozen maps of the stacked layers."""

    def hosted(info: ParamInfo, trained: bool) -> bool:
        frozen = cfg.memory.frozen == "host" and not trained
        return frozen and info.stack == 2 and _is_large(info)

    return jax.tree.map(hosted, infos, trains)


def hosted_opt_state(cfg: RunConfig, opt_state: Any, infos: dict) -> Any:
    """True for every leaf of an optimizer state that lives in host memory: maps' and tables'."""
    known = flat(infos)

    def hosted(path: tuple, leaf: Any) -> bool:
        info = known.get(tail_in(path, known))
        return cfg.memory.optimizer == "host" and info is not None and _is_large(info)

    return jax.tree_util.tree_map_with_path(hosted, opt_state)


def with_masters(
    cfg: RunConfig, infos: dict, trains: dict, params: dict, opt_state: Any
) -> tuple[dict, Any]:
    """Shapes of parameters and optimizer state, with master weights apart where the config says so.

    Args:
      params, opt_state: ShapeDtypeStructs of a run without any.
    """
    flat_infos, flat_trains, leaves = flat(infos), flat(trains), flat(params)
    own = [p for p, info in flat_infos.items() if has_master(cfg, info, flat_trains[p])]
    if not own:
        return params, opt_state
    dtype = jnp.dtype(cfg.train.compute_dtype)
    copies = {path: jax.ShapeDtypeStruct(leaves[path].shape, dtype) for path in own}
    master = nested({path: leaves[path] for path in own})
    return nested(leaves | copies), MasterState(master, opt_state)


def copied(program: Program, params: dict, master: dict) -> tuple[dict, dict]:
    """Parameters and master weights out of the parameters as they are saved; consumes nothing.

    Args:
      params: with float32 leaves in host memory where there are masters.
      master: nested dicts with a leaf for each of these.
    """
    leaves, infos = flat(params), flat(program.parts.infos)
    wanted, where = flat(program.abstract.params), flat(program.shardings.params)
    own = list(flat(master))

    def cast(masters: list[jax.Array]) -> list[jax.Array]:
        copies = []
        for path, leaf in zip(own, masters, strict=True):
            lead = leaf.shape[: infos[path].stack]
            copy = jnp.zeros(leaf.shape, wanted[path].dtype)
            step = lambda _, master, none, d=copy.dtype: (master.astype(d), none)  # noqa: E731
            copies.append(update_layers(step, lead, copy, leaf, ())[0])
        return copies

    masters = [leaves[path] for path in own]
    with jax.set_mesh(program.mesh):
        copies = jax.jit(cast, out_shardings=[where[path] for path in own])(masters)
    params = nested(leaves | dict(zip(own, copies, strict=True)))
    return params, nested({path: leaves[path] for path in own})


def without_master(opt_state: Any) -> tuple[dict, Any]:
    """Master weights, {} without any, and the optimizer's own state."""
    return opt_state if isinstance(opt_state, MasterState) else ({}, opt_state)


def full_params(state: TrainState) -> dict:
    """The parameters as they are saved: where there are master weights, these."""
    master, _ = without_master(state.opt_state)
    return nested(flat(state.params) | flat(master)) if master else state.params


def update_on_host(
    program: Program, state: TrainState, grads: dict, *,
    norm: jax.Array, ok: jax.Array, finish: Finish,
) -> tuple[dict, Any]:  # fmt: skip
    """Parameters and optimizer state after a step's update, made layer by layer.

    Args:
      program, state: before it.
      grads: of the trained parameters.
      norm: their global norm.
      ok: where False, nothing changes.
      finish: what else happens to updates and parameters.
    """
    trained, frozen = split(state.params, program.trains)
    master, inner = without_master(state.opt_state)
    before = nested(flat(trained) | flat(master))
    copies = {path: leaf for path, leaf in flat(trained).items() if path in flat(master)}
    infos = split(program.parts.infos, program.trains)[0]
    after, inner, copies = streamed_update(
        program.cfg.optim, program.cfg.train.num_steps, infos, grads, inner, before, copies,
        norm=norm, ok=ok, finish=finish,
    )  # fmt: skip
    params = nested(flat(frozen) | flat(after) | copies)
    if not master:
        return params, inner
    after = flat(after)
    return params, MasterState(nested({path: after[path] for path in flat(master)}), inner)
