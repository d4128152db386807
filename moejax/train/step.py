"""One training step: microbatches, loss, gradients, update, balancing.

Pure; the one jitted entry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.layers.moe.balance import new_bias
from moejax.layers.vision.images import images_of
from moejax.losses.budget import LossPlan, plan_loss
from moejax.losses.sharded_head import sharded_head_loss
from moejax.memory.policy import names_checked, policy_of
from moejax.models.decoder import by_layer
from moejax.optim import clip_key, clip_query, global_norm, make_schedule, qk_clip_factors
from moejax.optim.streamed import Finish
from moejax.partitioning import BATCH_AXES, batch_local, num_batch_shards, stored_layout
from moejax.train.host_update import update_on_host
from moejax.train.state import Program, TrainState
from moejax.train.trainable import merge, split
from pallas_kernels.choose import preferring
from pallas_kernels.linear_xent import linear_xent

# tokens, labels, segment_ids: int32 [microbatches, B, T]; and buffers of images, see `images_of`
Batch = dict[str, jax.Array]


def _with_kernels(step: Callable) -> Callable:
    """A function of a program whose operators are those that its config prefers."""

    @functools.wraps(step)
    def run(program: Program, *args):
        with preferring(program.cfg.kernels.impl):
            return step(program, *args)

    return run


def batch_sharding(program: Program) -> NamedSharding:
    """Where a batch lives: microbatches in front, rows over data x fsdp x expert."""
    return NamedSharding(program.mesh, P(None, BATCH_AXES))


def _loss_plan(program: Program, table, hidden_BTD: jax.Array) -> LossPlan:
    """How the loss goes through this batch's rows and the head."""
    cfg, sizes = program.cfg, dict(program.mesh.shape)
    layout = stored_layout(table.get_metadata()["axes"], table[...].shape, sizes)
    axes = [a for entry in layout for a in ((entry,) if isinstance(entry, str) else entry or ())]
    rows = hidden_BTD.shape[0] * hidden_BTD.shape[1] // num_batch_shards(sizes)
    trains = program.trains["embed" if cfg.model.tie_embeddings else "head"]["table"]
    return plan_loss(
        rows, *table[...].shape, itemsize=hidden_BTD.dtype.itemsize, trained=trains,
        num_shards=math.prod(sizes[axis] for axis in axes), budget=cfg.memory.loss_bytes,
        rows=cfg.train.rows_per_chunk, vocab=cfg.train.vocab_per_chunk,
    )  # fmt: skip


def token_loss(program: Program, model, hidden_BTD: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """Summed cross entropy of the labels that count, float32; logits exist in chunks only."""
    cfg = program.cfg.train
    table = model.head_table()
    plan = _loss_plan(program, table, hidden_BTD)
    if not plan.whole_head:
        return sharded_head_loss(
            hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), table[...], labels_BT.reshape(-1),
            table.get_metadata()["axes"], rows=plan.rows, vocab=plan.vocab, z_loss=cfg.z_loss,
        )  # fmt: skip

    def local(hidden_BTD, labels_BT, table_VD):
        loss, _ = linear_xent(
            hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), table_VD, labels_BT.reshape(-1),
            z_loss=cfg.z_loss, rows_per_chunk=cfg.rows_per_chunk or None,
            vocab_per_chunk=cfg.vocab_per_chunk or None,
        )  # fmt: skip
        return loss[None]

    run = batch_local(local, (0, 0), weights={2: table.get_metadata()["axes"]})
    return jnp.sum(run(hidden_BTD, labels_BT, table[...].astype(hidden_BTD.dtype)))


def _forward(
    program: Program,
    params: dict,
    balance: dict,
    micro: Batch,
    key: jax.Array | None,
    training: bool,
):
    cfg = program.cfg.train
    model = program.parts.bind(params, balance)
    hidden_BTD, aux = model(
        micro["tokens"], micro["segment_ids"], dtype=jnp.dtype(cfg.compute_dtype),
        remat=policy_of(program.cfg) if training else "none", dropout_key=key,
        images=images_of(micro),
    )  # fmt: skip
    return token_loss(program, model, hidden_BTD, micro["labels"]), aux


def _counts(batch: Batch) -> dict[str, jax.Array]:
    """Denominators over the whole batch, so that accumulation does not change any mean."""
    same = batch["segment_ids"][..., 1:] == batch["segment_ids"][..., :-1]
    return {
        "labels": jnp.maximum(jnp.sum(batch["labels"] >= 0), 1).astype(jnp.float32),
        # Queries with more than one visible key: the first token of a document has a KL of 0 by
        # definition.
        "queries": jnp.maximum(jnp.sum(same & (batch["segment_ids"][..., 1:] > 0)), 1).astype(
            jnp.float32
        ),
        "rows": jnp.float32(batch["tokens"].shape[0] * batch["tokens"].shape[1]),
    }


def micro_loss(
    program: Program, params, balance, micro: Batch, counts, key
) -> tuple[jax.Array, dict]:
    """This microbatch's share of the step's loss, and what it measured."""
    model, segments = program.cfg.model, program.parts.segments
    loss_sum, aux = _forward(program, params, balance, micro, key, training=True)
    measured = {"loss": loss_sum / counts["labels"], "aux": aux}
    kl, aux_loss = by_layer(aux, segments, "indexer_kl"), by_layer(aux, segments, "aux_loss")
    warmup = model.dsa.stage == "warmup" and kl is not None
    objective = jnp.zeros_like(loss_sum) if warmup else measured["loss"]
    if kl is not None:
        objective = objective + model.dsa.kl_weight * jnp.sum(kl) / counts["queries"]
    if aux_loss is not None:
        objective = objective + model.moe.aux_weight * jnp.sum(aux_loss) / counts["rows"]
    return objective, jax.lax.stop_gradient(measured)


_TAKE_MAX = ("rounds", "max_logit")  # over microbatches; everything else is a sum


def _start(path, shape) -> jax.Array:
    """What a measured value starts from before the first microbatch."""
    lowest = -jnp.inf if path[-1].key in _TAKE_MAX else 0
    return jnp.full(shape.shape, lowest, shape.dtype)


def _add(path, total: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.maximum(total, new) if path[-1].key in _TAKE_MAX else total + new


@_with_kernels
def gradients(program: Program, state: TrainState, batch: Batch) -> tuple[dict, dict]:
    """Gradient of the step's loss, and the measured values; one pass a microbatch.

    Microbatches are summed in `train.accum_dtype`.

    Of the trained parameters only: of the others none is computed.
    """
    counts = _counts(batch)
    trained, frozen = split(state.params, program.trains)
    key = None
    if program.cfg.model.dropout or program.cfg.lora.dropout:
        key = jax.random.fold_in(jax.random.key(program.cfg.seed), state.step)

    def one(micro: Batch, number: jax.Array):
        micro_key = None if key is None else jax.random.fold_in(key, number)

        def loss(trained: dict):
            params = merge(trained, frozen)
            return micro_loss(program, params, state.balance, micro, counts, micro_key)

        with names_checked(program.cfg):
            (_, measured), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        return grads, measured

    num_micro, accum = batch["tokens"].shape[0], jnp.dtype(program.cfg.train.accum_dtype)
    first = jax.tree.map(lambda a: a[0], batch)
    if num_micro == 1:
        grads, measured = one(first, jnp.int32(0))
        # Of one microbatch nothing is summed, so a wide accumulator would only hold narrow numbers.
        narrow = jax.tree.map(lambda g: g.astype(accum) if accum.itemsize < 4 else g, grads)
        return _stored(program, narrow), measured

    def accumulate(total, xs):
        grads, measured = one(*xs)
        sums = jax.tree.map(
            lambda a, g: (a.astype(jnp.float32) + g.astype(jnp.float32)).astype(accum),
            total[0], grads,
        )  # fmt: skip
        grads = _stored(program, sums)
        return (grads, jax.tree_util.tree_map_with_path(_add, total[1], measured)), None

    grads, measured = jax.eval_shape(one, first, jnp.int32(0))
    start = (
        _stored(program, jax.tree.map(lambda g: jnp.zeros(g.shape, accum), grads)),
        jax.tree_util.tree_map_with_path(_start, measured),
    )
    return jax.lax.scan(accumulate, start, (batch, jnp.arange(num_micro, dtype=jnp.int32)))[0]


def _stored(program: Program, grads: dict) -> dict:
    """Gradients in the layout of their parameters.

    A reduce-scatter, not an all-reduce, where the platform has it.
    """
    shardings = split(program.shardings.params, program.trains)[0]
    return jax.tree.map(jax.lax.with_sharding_constraint, grads, shardings)


def _of_stage(program: Program, infos: dict, updates: dict) -> dict:
    """Updates of what this stage trains.

    Only the indexer in DSA warm-up, all but it when it is frozen.
    """
    stage = program.cfg.model.dsa.stage
    has_indexer = "dsa" in program.cfg.model.attention_kinds()
    if not has_indexer or stage == "sparse":
        return updates
    wanted = stage == "warmup"
    return jax.tree.map(
        lambda info, u: u if (".indexer." in info.name) == wanted else jnp.zeros_like(u),
        infos,
        updates,
    )


def _each_run(program: Program, aux):
    """(stack name, run name, kind, that run's auxiliary values) of every run."""
    for s, (segment, runs) in enumerate(zip(program.parts.segments, aux, strict=True)):
        for r, (run, values) in enumerate(zip(segment.runs, runs, strict=True)):
            yield f"stack{s}", f"run{r}", run.kind, values


def _next_balance(program: Program, balance: dict, aux) -> dict:
    """Balancing state for the next step.

    Each run's biases [repeats, count, E] from what its layers measured.
    """
    model = program.cfg.model
    warmup = model.dsa.stage == "warmup" and "dsa" in model.attention_kinds()
    if program.has_base or warmup:  # the experts keep the loads that they were trained with
        return balance
    out = jax.tree.map(lambda leaf: leaf, balance)  # fresh dicts
    for stack, run, kind, values in _each_run(program, aux):
        if kind.ffn == "moe":
            router = out[stack][run]["ffn"]["router"]
            counts = values.get("bias_counts")
            router["bias"] = new_bias(program.cfg.model.moe, router["bias"], values["load"], counts)
    return out


def _qk_factors(program: Program, aux) -> dict[tuple[str, str], jax.Array]:
    """What QK-clip multiplies the heads' maps by, [repeats, count, N], of the runs that have it."""
    tau = program.cfg.optim.qk_clip
    return {
        (stack, run): qk_clip_factors(values["max_logit"], tau)
        for stack, run, kind, values in (_each_run(program, aux) if tau else ())
        if kind.attention != "kda"
    }


def _clip_qk(program: Program, params: dict, factors: dict[tuple[str, str], jax.Array]) -> dict:
    """Query and key weights of heads whose logits passed the threshold, shrunk (QK-clip)."""
    out = jax.tree.map(lambda leaf: leaf, params)
    for (stack, run), gamma in factors.items():
        attn = out[stack][run]["attn"]
        query = "q_b" if "q_b" in attn else "q"
        attn[query] = clip_query(attn[query], gamma, program.cfg.model.mla.nope_dim)
        attn["k_b"] = clip_key(attn["k_b"], gamma)
    return out


def _finish(program: Program, aux) -> Finish:
    """What updates and parameters of one layer still go through."""
    factors = _qk_factors(program, aux)
    return Finish(
        functools.partial(_of_stage, program),
        lambda params, layer: _clip_qk(program, params, layer),
        {name: {name: gamma} for name, gamma in factors.items()},
    )


def _updated(
    program: Program, state: TrainState, grads: dict, measured: dict, norm: jax.Array, ok: jax.Array
) -> TrainState:
    """The state after a step's update, `ok` looked at only where it is in host memory."""
    balance, step = _next_balance(program, state.balance, measured["aux"]), state.step + 1
    if program.cfg.memory.optimizer == "host":
        finish = _finish(program, measured["aux"])
        now = update_on_host(program, state, grads, norm=norm, ok=ok, finish=finish)
        return TrainState(*now, balance, step)
    trained, frozen = split(state.params, program.trains)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, opt_state = program.optimizer.update(grads, state.opt_state, trained)
    infos = split(program.parts.infos, program.trains)[0]
    trained = optax.apply_updates(trained, _of_stage(program, infos, updates))
    params = _clip_qk(program, merge(trained, frozen), _qk_factors(program, measured["aux"]))
    return TrainState(params, opt_state, balance, step)


@_with_kernels
def train_step(
    program: Program, state: TrainState, batch: Batch, highest_loss: jax.Array | None = None
) -> tuple[TrainState, dict]:
    """One update.

    Args:
      program: static parts of the run.
      state: state before the step; donate it.
      batch: int32 arrays [microbatches, B, T], rows sharded as :func:`batch_sharding`.
      highest_loss: float32 scalar; a step with a higher loss is bad. None = no finite loss is.
    Returns:
      The next state (the old one where the step is bad, loss or gradient not finite or the loss
      too high, so that nothing is spoilt; with `train.bad_step` skip and rewind its `step` counts
      on), and metrics: scalars, and values [layers, ...] of the layers that have them.
    """
    grads, measured = gradients(program, state, batch)
    norm = global_norm(grads)
    ok = jnp.isfinite(measured["loss"]) & jnp.isfinite(norm)
    if highest_loss is not None:
        ok &= measured["loss"] <= highest_loss
    new = _updated(program, state, grads, measured, norm, ok)
    old = state if program.cfg.train.bad_step == "stop" else state._replace(step=new.step)
    if program.cfg.memory.optimizer == "host":  # layer by layer it was looked at already
        old = old._replace(params=new.params, opt_state=new.opt_state)
    new = jax.tree.map(lambda a, b: a if a is b else jnp.where(ok, a, b), new, old)
    return new, _metrics(program, state, batch, measured, norm, ok)


def _metrics(program: Program, state: TrainState, batch: Batch, measured: dict, norm, ok) -> dict:
    segments, counts = program.parts.segments, _counts(batch)
    schedule = make_schedule(program.cfg.optim, program.cfg.train.num_steps)
    out = {
        "loss": measured["loss"],
        "grad_norm": norm,
        "finite": ok,
        "lr": schedule(state.step) * program.cfg.optim.lr,
        "labels": counts["labels"],
    }
    for name, scale in (
        ("load", None), ("dropped", None), ("rounds", None), ("max_logit", None),
        ("sent_bytes", None), ("sent_bytes_network", None),
        ("indexer_kl", counts["queries"]), ("aux_loss", counts["rows"]),
    ):  # fmt: skip
        value = by_layer(measured["aux"], segments, name)
        if value is not None:
            out[name] = value if scale is None else value / scale
    return out


@_with_kernels
def eval_step(
    program: Program, params: dict, balance: dict, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Summed token loss of a batch [1, B, T] and how many labels it has."""
    micro = jax.tree.map(lambda a: a[0], batch)
    loss_sum, _ = _forward(program, params, balance, micro, None, training=False)
    return loss_sum, jnp.sum(micro["labels"] >= 0)
