"""A saved state comes back bit for bit on any mesh; damage is named and never passes in silence."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint import CheckpointError, Checkpoints, locate, read_config
from moejax.config import CheckpointConfig, ConfigError

MESHES = (
    {"fsdp": 8},
    {"expert": 8},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "expert": 2},
)
CONFIG = {"seed": 1, "data": {"paths": ("a", "b"), "seq_len": 8}}
POSITION = {"worker": [3, 4], "blob": b"\x00\xff{}", "last": None}


def make_mesh(sizes):
    sizes = {axis: sizes.get(axis, 1) for axis in ("data", "fsdp", "expert")}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))


def make_state(mesh, *, width=16, seed=0, dtype=jnp.float32):
    """Weights in two dtypes with extreme bit patterns, an optax state with empty nodes, a key."""
    rng = np.random.default_rng(seed)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    bits_8W = rng.integers(0, 2**16, (8, width), dtype=np.uint16)
    params = {
        "dense": put(jnp.asarray(rng.normal(size=(width, 24)), dtype), ("fsdp", "expert"), None),
        "experts": put(jnp.asarray(rng.normal(size=(8, 8, 4)), jnp.float32), "expert", "fsdp"),
        "half": put(jax.lax.bitcast_convert_type(bits_8W, jnp.bfloat16), ("fsdp", "expert")),
    }
    return {
        "params": params,
        "opt_state": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params),
        "balance": {"bias": put(jnp.arange(8, dtype=jnp.float32) - 0.1)},
        "step": put(jnp.int32(seed)),
        "rng": put(jax.random.key_data(jax.random.key(seed))),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def bits(tree):
    """Every leaf as raw bytes: NaN payloads and the sign of zero count."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def save_steps(workdir, steps, cfg=None, losses=None):
    checkpoints = Checkpoints(workdir, cfg or CheckpointConfig(keep=10))
    mesh = make_mesh(MESHES[0])
    for step in steps:
        metrics = {"eval_loss": losses[step]} if losses and step in losses else None
        state = make_state(mesh, seed=step)
        assert checkpoints.save(step, state, position=POSITION, config=CONFIG, metrics=metrics)
    checkpoints.wait()
    return checkpoints


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A workdir with steps 10 and 20, only read by the tests that use it."""
    workdir = tmp_path_factory.mktemp("run")
    save_steps(workdir, (10, 20)).close()
    return workdir


@pytest.fixture
def two_own_steps(two_steps, tmp_path):
    """A copy of `two_steps` that a test may damage."""
    return pathlib.Path(shutil.copytree(two_steps, tmp_path / "run"))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_restores_bit_for_bit_on_every_mesh(two_steps, sizes):
    wanted = abstract(make_state(make_mesh(sizes)))
    restored = Checkpoints(two_steps).restore(None, wanted)
    state, position, config = restored
    assert bits(state) == bits(make_state(make_mesh(MESHES[0]), seed=20))
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert (got.sharding, got.dtype) == (want.sharding, want.dtype)
    assert position == POSITION
    assert config == {"seed": 1, "data": {"paths": ["a", "b"], "seq_len": 8}}
    assert (restored.step, restored.warning) == (20, None)


def test_a_named_step_and_weights_alone(two_steps):
    mesh = make_mesh(MESHES[2])
    ten = make_state(mesh, seed=10)
    state, _, _ = Checkpoints(two_steps).restore(10, abstract(ten))
    assert bits(state) == bits(ten)
    for path, seed in (
        (two_steps, 20),
        (two_steps / "checkpoints", 20),
        (two_steps / "checkpoints" / "10", 10),
    ):
        params = make_state(mesh, seed=seed)["params"]
        assert bits(Checkpoints.restore_weights(path, abstract(params))) == bits(params)
    assert read_config(two_steps)["seed"] == 1


def test_weights_take_the_dtype_asked_for(two_steps):
    wanted = abstract(make_state(make_mesh(MESHES[0]), dtype=jnp.bfloat16)["params"])
    got = Checkpoints.restore_weights(two_steps, wanted)
    exact = make_state(make_mesh(MESHES[0]), seed=20)["params"]["dense"]
    assert bits(got["dense"]) == bits(exact.astype(jnp.bfloat16))


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    mesh = make_mesh(MESHES[0])
    state = {"params": {"w": jnp.ones((512, 512)), "v": jnp.ones((8, 4096))}}
    state = jax.device_put(state, NamedSharding(mesh, P("fsdp")))
    wanted, expected = abstract(state), bits(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, position=None, config={})
    jax.block_until_ready(spoil(state))
    assert bits(checkpoints.restore(1, wanted).state) == expected
    checkpoints.close()


def test_keeps_newest_multiples_and_best(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 3.0, 4: float("nan"), 6: 2.0, 7: 2.5}
    cfg = CheckpointConfig(keep=2, keep_every=4)
    checkpoints = save_steps(tmp_path, range(1, 6), cfg, losses)
    assert checkpoints.all_steps() == [2, 4, 5]
    checkpoints.close()
    # A resumed run reads the losses of the steps on disk.
    checkpoints = save_steps(tmp_path, (6, 7, 8), cfg, losses)
    assert (checkpoints.all_steps(), checkpoints.best_step()) == ([2, 4, 7, 8], 2)
    checkpoints.close()
    without_best = CheckpointConfig(keep=1, keep_best=False)
    assert save_steps(tmp_path, (9,), without_best).all_steps() == [9]


def test_period_and_saving_twice(tmp_path):
    checkpoints = save_steps(tmp_path, (1,), CheckpointConfig(every=50, asynchronous=False))
    state = make_state(make_mesh(MESHES[0]), seed=7)
    assert not checkpoints.save(1, state, position=1, config={})
    assert checkpoints.save(1, state, position=2, config={}, force=True)
    assert checkpoints.restore(None, abstract(state)).position == 2
    assert [s for s in (0, 1, 49, 50, 51, 100) if checkpoints.due(s)] == [50, 100]
    assert not Checkpoints(tmp_path, CheckpointConfig(every=0)).due(50)


def _data_file(step_dir):
    return max((p for p in step_dir.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _flip(step_dir):
    path = _data_file(step_dir)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _truncate(step_dir):
    os.truncate(_data_file(step_dir), 7)


def _remove(step_dir):
    _data_file(step_dir).unlink()


def _remove_unlisted(step_dir):
    """Damage that only Orbax can see, which without this raises with pages of settings."""
    (step_dir / "checksums.json").unlink()
    for path in (step_dir / "params").glob("**/d/*"):
        os.truncate(path, path.stat().st_size // 2)


def _hollow(step_dir):
    shutil.rmtree(step_dir)
    step_dir.mkdir()


@pytest.mark.parametrize("hurt", [_flip, _truncate, _remove, _remove_unlisted, _hollow])
def test_damage_is_named_and_the_previous_one_offered(two_own_steps, hurt, capfd):
    newest = two_own_steps / "checkpoints" / "20"
    hurt(newest)
    wanted = abstract(make_state(make_mesh(MESHES[1])))
    checkpoints = Checkpoints(two_own_steps, CheckpointConfig(keep=5))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(None, wanted)
    message = str(caught.value)
    assert f"{newest} is damaged (" in message and "\n" not in message
    assert str(newest.with_name("10")) in message
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpoints.restore_weights(two_own_steps, wanted["params"])
    restored = checkpoints.restore(None, wanted, fallback=True)
    assert restored.step == 10 and str(newest) in restored.warning
    assert bits(restored.state) == bits(make_state(make_mesh(MESHES[0]), seed=10))
    assert capfd.readouterr().err == ""  # one line means one line: no tensorstore dump beside it
    # Going on from 10 reaches 20 again; the damaged one no longer stands in the way.
    state = make_state(make_mesh(MESHES[0]), seed=20)
    assert checkpoints.save(20, state, position=POSITION, config=CONFIG)
    assert bits(checkpoints.restore(None, wanted).state) == bits(state)
    assert (two_own_steps / "checkpoints" / "20.damaged").is_dir()
    checkpoints.close()


def test_going_back_replaces_later_steps_as_they_are_reached(two_own_steps):
    checkpoints = Checkpoints(two_own_steps, CheckpointConfig(keep=5))
    wanted = abstract(make_state(make_mesh(MESHES[0])))
    checkpoints.restore(10, wanted)
    other = make_state(make_mesh(MESHES[0]), seed=99)
    assert checkpoints.save(20, other, position=0, config={})
    assert bits(checkpoints.restore(20, wanted).state) == bits(other)
    checkpoints.close()


def test_only_damaged_steps(two_own_steps):
    for step in ("10", "20"):
        _truncate(two_own_steps / "checkpoints" / step)
    wanted = abstract(make_state(make_mesh(MESHES[0])))
    with pytest.raises(CheckpointError, match="No earlier checkpoint can be read"):
        Checkpoints(two_own_steps).restore(None, wanted, fallback=True)
    with pytest.raises(CheckpointError, match="There is no earlier one"):
        Checkpoints(two_own_steps).restore(None, wanted)


def test_another_shape_names_the_first_leaf(two_steps):
    def refuse(match, change):
        state = make_state(make_mesh(MESHES[0]))
        change(state)
        with pytest.raises(CheckpointError, match=match) as caught:
            Checkpoints(two_steps).restore(None, abstract(state), fallback=True)
        assert "\n" not in str(caught.value)

    wide = make_state(make_mesh(MESHES[0]), width=32)
    refuse(
        r"params/dense is float32\(16, 24\) there and float32\(32, 24\)", lambda s: s.update(wide)
    )
    refuse("it has no balance/extra", lambda s: s["balance"].update(extra=jnp.ones(3)))
    refuse("it also has balance/bias", lambda s: s["balance"].clear())
    refuse("step is int32.* and float32", lambda s: s.update(step=jnp.float32(0)))


def test_other_format_version(two_own_steps):
    step_dir = two_own_steps / "checkpoints" / "20"
    meta = json.loads((step_dir / "meta" / "metadata").read_text())
    (step_dir / "meta" / "metadata").write_text(json.dumps(meta | {"format_version": 99}))
    (step_dir / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match="format_version 99; this moejax reads 1"):
        Checkpoints(two_own_steps).restore(
            None, abstract(make_state(make_mesh(MESHES[0]))), fallback=True
        )


def test_what_is_not_a_checkpoint(tmp_path, two_steps):
    wanted = abstract(make_state(make_mesh(MESHES[0])))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"no checkpoint at .*: found notes.txt\."):
        locate(tmp_path)
    with pytest.raises(CheckpointError, match="the path does not exist"):
        Checkpoints.restore_weights(tmp_path / "nowhere", wanted["params"])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15 in .*: it has \[10, 20\]"):
        Checkpoints(two_steps).restore(15, wanted)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Checkpoints(tmp_path).restore(None, wanted)
    assert (Checkpoints(tmp_path).latest_step(), Checkpoints(two_steps).latest_step()) == (None, 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written to .*Not a directory"):
        checkpoints.save(1, {"params": {"w": jnp.ones(2)}}, position=None, config={})


_KILLED = """
import os, sys, threading, time, jax.numpy as jnp
from moejax.checkpoint import Checkpoints
from moejax.config import CheckpointConfig
checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(keep=3))
one = lambda value: jnp.full((200, 1000), value, jnp.float32)
state = lambda k: {"params": {f"w{i}": one(k + i) for i in range(24)}}
for step in (1, 2):
    checkpoints.save(step, state(step), position=step, config={})
checkpoints.wait()
threading.Thread(target=lambda: (time.sleep(float(sys.argv[2])), os.kill(os.getpid(), 9))).start()
checkpoints.save(3, state(3), position=3, config={})
checkpoints.wait()
time.sleep(60)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_kill_in_mid_save_loses_at_most_that_step(tmp_path, delay_s):
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(delay_s)]
    died = subprocess.run(command, capture_output=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    wanted = {
        "params": {f"w{i}": jax.ShapeDtypeStruct((200, 1000), jnp.float32) for i in range(24)}
    }
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=3))
    restored = checkpoints.restore(None, wanted)
    assert restored.step in (2, 3) and restored.position == restored.step
    for i in range(24):
        assert np.all(np.asarray(restored.state["params"][f"w{i}"]) == restored.step + i)
    # The leftovers neither count as steps nor disturb saving that step again.
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted)
    checkpoints.save(3, state, position=33, config={})
    assert checkpoints.restore(None, wanted).position == 33
    checkpoints.close()
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["1", "2", "3"]


def test_no_pickle_in_a_checkpoint(two_steps):
    blobs = [p.read_bytes() for p in (two_steps / "checkpoints").rglob("*") if p.is_file()]
    assert blobs and not any(
        blob.startswith(b"\x80\x04") or b"numpy.core" in blob for blob in blobs
    )
