"""A run whose experts move while it trains is the run whose experts stay; so is what it saves."""

import functools
import types

import jax
import numpy as np
import pytest

from moejax.checkpoint import Checkpoints
from moejax.checkpoint.hf_export import export_hf
from moejax.config import (
    CheckpointConfig,
    ConfigError,
    MeshConfig,
    OptimConfig,
    PlacementConfig,
    RunConfig,
    TrainConfig,
)
from moejax.layers.moe.placement import Placement, canonical, place_tables
from moejax.train.loop import Loop
from moejax.train.placement import Placer, apply_placement, open_placer, without_places
from moejax.train.placement_file import write_placement
from moejax.train.state import (
    Program,
    TrainState,
    abstract_tree,
    build_program,
    from_tree,
    init_state,
)
from moejax.train.step import batch_sharding, train_step
from tests.models.small_configs import small
from tests.sharded.meshes import FSDP2_EXPERT4, FSDP8, assert_leaves_agree, mesh_of

B, T, STEPS, MOVE_AFTER = 8, 8, 5, 2
FAST_COMPILE = {"xla_backend_optimization_level": 0}
MODEL = small(
    "mla", 2, attn_res_block=0, mla={"output_gate": "none", "rope": "interleaved", "q_latent": 0},
    ffn={"activation": "swiglu", "num_dense_layers": 0},
    moe={"num_experts": 16, "latent_dim": 0, "num_shared": 1},
)  # fmt: skip


# The slow run also recomputes its layers from what came over the wire.
REMAT = {"muon": "none", "adamw": "exchange"}


def config(sizes: dict, optimizer: str = "muon", **placement) -> RunConfig:
    return RunConfig(
        model=MODEL.replace(init_std=0.1),
        mesh=MeshConfig(**sizes),
        optim=OptimConfig(
            name=optimizer, muon_steps=1, ema_decay=0.9, warmup_fraction=0.0, schedule="constant"
        ),
        train=TrainConfig(num_steps=STEPS, remat=REMAT[optimizer]),
        placement=PlacementConfig(**placement),
    )


@functools.cache
def plain_program(optimizer: str = "muon") -> Program:
    """A run that places experts on fsdp=2 x expert=4, as its checkpoints know it."""
    cfg = config(FSDP2_EXPERT4, optimizer, every=MOVE_AFTER, copies=1)
    return build_program(cfg, mesh_of(FSDP2_EXPERT4))


def host(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def start(optimizer: str = "muon") -> TrainState:
    return host(init_state(plain_program(optimizer), 0))


def begun(placer: Placer, saved=None) -> TrainState:
    """The starting state in the hands of a placer."""
    plain = plain_program(placer.program.cfg.optim.name)
    return placer.begin(jax.device_put(start(plain.cfg.optim.name), plain.shardings), saved)


@functools.cache
def compiled_step(optimizer: str):
    program = Placer(plain_program(optimizer)).program
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, (STEPS, 1, B, T), dtype=np.int32)
    put = functools.partial(jax.device_put, device=batch_sharding(program))
    batches = [
        {name: put(x) for name, x in (("tokens", t), ("labels", t), ("segment_ids", t * 0 + 1))}
        for t in tokens
    ]
    step = jax.jit(
        lambda state, batch: train_step(program, state, batch),
        out_shardings=(program.shardings, None), donate_argnums=0, compiler_options=FAST_COMPILE,
    )  # fmt: skip
    return step, batches


def trained(optimizer: str, moves: bool) -> tuple[TrainState, list[dict], Placer]:
    """The state after all steps, in order; the metrics of each."""
    placer, metrics = Placer(plain_program(optimizer)), []
    step, batches = compiled_step(optimizer)
    state = begun(placer)
    with jax.set_mesh(placer.program.mesh):
        for number, batch in enumerate(batches, 1):
            state, measured = step(state, batch)
            metrics.append(host(measured))
            placer.observe(metrics[-1]["load"])
            if moves and placer.due(number):
                state, line = placer.renew(state)
                assert "experts placed by" in line
        state = host(placer.in_order(state))
    return state._replace(balance=without_places(state.balance)), metrics, placer


def check_training(optimizer: str) -> None:
    stayed, want, _ = trained(optimizer, moves=False)
    moved, got, placer = trained(optimizer, moves=True)
    plain = canonical(*placer.placement.slots_LE.shape, placer.placement.spread)
    assert np.all((placer.placement.slots_LE != plain.slots_LE).any(1))
    assert (placer.placement.copies_LPc < 16).any()
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine["load"], theirs["load"])
        np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5)
        np.testing.assert_allclose(mine["grad_norm"], theirs["grad_norm"], rtol=1e-5)
    assert_leaves_agree(moved.params, stayed.params, 1e-4)
    assert_leaves_agree(moved.opt_state, stayed.opt_state, 1e-4)
    assert_leaves_agree(moved.balance, stayed.balance, 1e-5)
    assert want[-1]["loss"] < want[0]["loss"]


def test_training_goes_on_alike_with_muon():
    check_training("muon")


@pytest.mark.slow
def test_training_goes_on_alike_with_adamw_and_recomputed_layers():
    check_training("adamw")


def shuffled(placer: Placer, seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    plain = canonical(*placer.placement.slots_LE.shape, placer.placement.spread)
    return plain._replace(slots_LE=rng.permuted(plain.slots_LE, axis=1))


def same_bits(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def experts_of(tree: dict) -> np.ndarray:
    return np.asarray(tree["stack0"]["run0"]["ffn"]["experts"]["down"])


def test_placements_compose_and_come_back():
    placer = Placer(plain_program())
    one, two = shuffled(placer, 1), shuffled(placer, 2)
    move = functools.partial(apply_placement, placer.program)
    state = begun(placer)
    plain, before = placer.placement, host(state)
    state = move(state, plain, one)
    # Weights, averages and momentum lie in the slots that the table tells the layers.
    rows = np.arange(2)[:, None]
    for got, was in (
        (experts_of(state.params), experts_of(before.params)),
        (experts_of(state.opt_state[-1].average), experts_of(before.opt_state[-1].average)),
    ):
        np.testing.assert_array_equal(got[0][rows, one.slots_LE], was[0])
    places, _ = place_tables(one)
    got = np.asarray(state.balance["stack0"]["run0"]["ffn"]["places"])
    np.testing.assert_array_equal(got, places[None])
    assert jax.tree.map(lambda a, s: a.sharding == s, state, placer.program.shardings) == (
        jax.tree.map(lambda _: True, placer.program.shardings)
    )
    both = host(move(state, one, two))
    assert same_bits(both, move(begun(placer), plain, two))
    back = move(jax.device_put(both, placer.program.shardings), two, plain)
    assert same_bits(back, before)


def saved_by_loop(placer: Placer | None, state: TrainState, cfg: RunConfig, workdir) -> TrainState:
    """`Loop.save` of a run that stands at this state. Returns the state it goes on with."""
    checkpoints = Checkpoints(workdir, CheckpointConfig(asynchronous=False))
    loop = types.SimpleNamespace(
        state=state, placer=placer, checkpoints=checkpoints, cfg=cfg, last={}, tokens=0,
        iterator=types.SimpleNamespace(get_state=dict), loads=None, base=None,
        program=types.SimpleNamespace(has_base=False), local=None,
        bad_steps=types.SimpleNamespace(position=lambda: {"count": 0, "losses": []}),
    )  # fmt: skip
    Loop.save(loop, STEPS)
    checkpoints.close()
    return loop.state


def test_a_checkpoint_is_in_order_and_resumes_on_any_mesh(tmp_path):
    plain = plain_program()
    placer = Placer(plain)
    target = shuffled(placer, 3)
    saved = {**placer.position(), "slots": target.slots_LE.tolist()}
    state = begun(placer, saved)
    placed = host(state)
    assert not same_bits(experts_of(placed.params), experts_of(start().params))
    state = saved_by_loop(placer, state, plain.cfg, tmp_path)
    assert same_bits(state, placed)  # the run goes on as it was
    other = build_program(config(FSDP8, every=MOVE_AFTER), mesh_of(FSDP8))
    restored = Checkpoints(tmp_path).restore(None, abstract_tree(other))
    again = from_tree(restored.state)
    assert same_bits(again, start())
    # A mesh with another number of devices takes the slots up, its own number of copies too.
    resumed = open_placer(other)
    again = resumed.begin(again, restored.position["placement"])
    np.testing.assert_array_equal(resumed.placement.slots_LE, target.slots_LE)
    assert resumed.placement.copies_LPc.shape == (2, 1, 0)
    assert same_bits(again.params, placed.params) and same_bits(again.opt_state, placed.opt_state)
    assert resumed.position()["loads"] == restored.position["placement"]["loads"]


def test_a_file_places_once(tmp_path):
    plain = plain_program()
    first, second = (shuffled(Placer(plain), seed) for seed in (4, 5))
    path = tmp_path / "placement.json"
    write_placement(path, first)
    cfg = plain.cfg.replace(placement=PlacementConfig(file=str(path), copies=1))
    placer = open_placer(plain._replace(cfg=cfg))
    begun(placer)
    np.testing.assert_array_equal(placer.placement.slots_LE, first.slots_LE)
    moved_on = {**placer.position(), "slots": second.slots_LE.tolist()}
    placer = open_placer(plain._replace(cfg=cfg))
    begun(placer, moved_on)  # resumed after it was placed anew: the file has had its turn
    np.testing.assert_array_equal(placer.placement.slots_LE, second.slots_LE)
    write_placement(path, first._replace(slots_LE=first.slots_LE[::-1]))
    placer = open_placer(plain._replace(cfg=cfg))
    begun(placer, moved_on)  # another file has not
    np.testing.assert_array_equal(placer.placement.slots_LE, first.slots_LE[::-1])


def test_without_the_setting_nothing_is_there():
    program = build_program(config(FSDP2_EXPERT4), mesh_of(FSDP2_EXPERT4))
    assert open_placer(program) is None
    tree = abstract_tree(program)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert not any("places" in name for name in names)
    with pytest.raises(ConfigError, match="placement.copies=2 has no effect"):
        PlacementConfig(copies=2)


def test_an_export_is_in_order(tmp_path):
    plain = plain_program()
    placer = Placer(plain)
    saved = {**placer.position(), "slots": shuffled(placer, 6).slots_LE.tolist()}
    states = {"stays": (None, start()), "moves": (placer, begun(placer, saved))}
    files = []
    for name, (of_run, state) in states.items():
        saved_by_loop(of_run, state, plain.cfg, tmp_path / name)
        export_hf(tmp_path / name, tmp_path / f"{name}_hf", dtype="float32")
        files.append({p.name: p.read_bytes() for p in (tmp_path / f"{name}_hf").iterdir()})
    assert files[0] == files[1] and any(name.endswith(".safetensors") for name in files[0])
