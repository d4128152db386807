"""The parameters that are float32 whatever the compute dtype: in every shipped config, through a
bfloat16 step on a mesh, a checkpoint, and into the operators."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax.layers.kda as kda_layer
import moejax.layers.moe.router as router_layer
from moejax.checkpoint import Checkpoints
from moejax.config.load import load_config, shipped_names
from moejax.layers.param import KEPT_FLOAT32, is_kept_float32
from moejax.models.decoder import layer_kinds
from moejax.models.parts import model_parts
from moejax.train import step
from moejax.train.state import abstract_tree, as_tree, build_program, from_tree, init_state
from tests.models.small_configs import small
from tests.sharded.meshes import ONE, mesh_of
from tests.sharded.stepping import FAST_COMPILE, config

# Two scanned layers that have all of them.
MODEL = small("kda", 2, attn_res_block=0, ffn={"num_dense_layers": 0}, moe={"num_experts": 4})
MESH = {"fsdp": 2, "expert": 2}
LEAVES = {leaf.rpartition(".")[2]: leaf for leaf in KEPT_FLOAT32}


def named_leaves(*trees):
    """Dotted path and leaf of every array of the trees."""
    for tree in trees:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield ".".join(entry.key for entry in path), leaf


def kept(*trees):
    """The leaves in question; all must be float32 and, by name, just those of `KEPT_FLOAT32`."""
    leaves = {name: leaf for name, leaf in named_leaves(*trees) if is_kept_float32(name)}
    assert all(leaf.dtype == jnp.float32 for leaf in leaves.values()), leaves
    return leaves


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_config(name):
    """Abstract: nothing is allocated. Counted by layer, so that no leaf goes by another name."""
    parts = model_parts(load_config(name).model)
    found = collections.Counter()
    for path, leaf in kept(parts.params, parts.balance).items():
        stack = 2 if path.startswith("stack") else 0
        layers = int(np.prod(leaf.shape[:stack]))
        found[next(kept for kept in KEPT_FLOAT32 if path.endswith(kept))] += layers
    kinds = layer_kinds(parts.cfg)
    num_kda = sum(kind.attention == "kda" for kind in kinds)
    num_moe = sum(kind.ffn == "moe" for kind in kinds)
    for leaf in KEPT_FLOAT32:
        assert found[leaf] == (num_kda if leaf.startswith("attn.") else num_moe), (name, leaf)


def test_names():
    assert is_kept_float32("stack0.run1.attn.a_log") and is_kept_float32("attn.a_log")
    assert is_kept_float32("stack0.run1.ffn.router.bias")
    for other in ("attn.q", "attn.q_norm.weight", "attn.xa_log", "ffn.router.weight", "a_log"):
        assert not is_kept_float32(other)


def program_on(mesh):
    run = config(mesh, MODEL, compute_dtype="bfloat16")
    adamw = run.optim.replace(name="adamw")  # compiles in half the time
    return build_program(run.replace(optim=adamw), mesh_of(mesh))


@pytest.fixture(scope="module")
def trained():
    """A program on a mesh whose compute is bfloat16, and its state before and after a step."""
    program = program_on(MESH)
    state = init_state(program, seed=3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (1, 4, 16), dtype=np.int32)
    batch = {"tokens": tokens, "labels": np.roll(tokens, -1, -1)}
    batch["segment_ids"] = np.ones_like(tokens)
    batch = jax.device_put(batch, step.batch_sharding(program))
    run = jax.jit(
        lambda state, batch: step.train_step(program, state, batch)[0],
        out_shardings=program.shardings,
        compiler_options=FAST_COMPILE,
    )
    with jax.set_mesh(program.mesh):
        return program, batch, state, run(state, batch)


def test_a_bfloat16_step_on_a_mesh_trains_them_in_float32(trained):
    program, _, before, after = trained
    old, new = (kept(state.params, state.balance) for state in (before, after))
    assert set(old) == set(new)
    assert {leaf for leaf in KEPT_FLOAT32 if any(n.endswith(leaf) for n in new)} == set(
        KEPT_FLOAT32
    )
    for name, leaf in new.items():
        assert not np.array_equal(leaf, old[name]), name
        low = leaf.astype(jnp.bfloat16).astype(jnp.float32)
        assert not np.array_equal(leaf, low), f"{name} holds bfloat16 numbers only"
        assert len(leaf.sharding.device_set) == 4
    # Their moments and averages too.
    moments = [leaf for _, leaf in named_opt(after.opt_state) if leaf.dtype != jnp.int32]
    assert moments and all(leaf.dtype == jnp.float32 for leaf in moments)


def named_opt(opt_state):
    """Optimizer arrays that belong to the parameters in question."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        name = ".".join(str(getattr(entry, "key", "")) for entry in path)
        if is_kept_float32(name):
            yield name, leaf


def test_a_checkpoint_gives_them_back_bit_for_bit(trained, tmp_path):
    """Written from four devices, read onto one: shards change, bits and dtype do not."""
    program, _, _, state = trained
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, as_tree(state, seed=3), config={}, position={})
    checkpoints.wait()
    one = program_on(ONE)
    read = from_tree(checkpoints.restore(None, abstract_tree(one)).state)
    checkpoints.close()
    new, old = kept(read.params, read.balance), kept(state.params, state.balance)
    assert set(new) == set(old)
    for name, leaf in new.items():
        assert np.asarray(leaf).tobytes() == np.asarray(old[name]).tobytes(), name


def test_operators_receive_them_in_float32(trained, monkeypatch):
    """Traced, not run: beside bfloat16 activations each operator gets float32 weights."""
    program, batch, state, _ = trained
    seen = collections.defaultdict(set)

    def spy(module, name):
        original = getattr(module, name)

        def recorded(*args, **kwargs):
            seen[name].add(tuple(getattr(arg, "dtype", None) for arg in args))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, recorded)

    for name in ("kda_fused", "short_conv", "gated_norm"):
        spy(kda_layer, name)
    spy(router_layer, "route")
    with jax.set_mesh(program.mesh):
        jax.eval_shape(lambda s, b: step.gradients(program, s, b)[0], state, batch)
    low, full = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert seen["kda_fused"] == {(low,) * 5 + (full,) * 2}  # q k v gate beta | a_log dt_bias
    assert seen["short_conv"] == {(low, full)}  # x | taps
    assert seen["gated_norm"] == {(low, low, full)}  # out gate | o_norm
    assert seen["route"] == {(full, full)}  # logits, bias
