"""Pieces written one by one read back as the checkpoint of a run; half of one is never left."""

import itertools
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint import (
    CheckpointError,
    Checkpoints,
    StreamedCheckpoint,
    has_part,
    piecewise,
    read_carried,
    read_config,
)
from moejax.checkpoint.piecewise import chunk_shape
from moejax.partitioning import ParamInfo

BF16 = np.dtype(ml_dtypes.bfloat16)
CONFIG = {"seed": 3, "model": {"dims": (1, 2)}}
CARRIED = {"mtp.w": np.arange(6, dtype=np.uint8), "mtp.s": np.ones((2, 2), BF16)}
SHAPES = {
    "params": {
        "embed": {"table": ((16, 8), BF16)},
        "stack": {"experts": {"gate_up": ((2, 1, 4, 8, 2, 6), BF16)}, "q": ((2, 1, 8, 4, 6), BF16)},
        "norm": ((2, 1, 8), np.dtype(np.float32)),
        "scalar": ((), np.dtype(np.float32)),
    },
    "balance": {"router": {"bias": ((2, 1, 4), np.dtype(np.float32))}},
}
INFOS = {
    "embed": {"table": ParamInfo("embed.table", ("vocab", "embed"))},
    "stack": {
        "experts": {
            "gate_up": ParamInfo("e", ("experts", "embed", None, "ffn"), stack=2, matrix=(-3, -1))
        },
        "q": ParamInfo("q", ("embed", "heads", None), stack=2, matrix=(-3, -1), head_axis=-2),
    },
    "norm": ParamInfo("norm", (None,), stack=2),
    "scalar": ParamInfo("scalar", ()),
}


def is_leaf(node):
    return isinstance(node, tuple)


def make_values(seed=0):
    """Arbitrary bit patterns: NaN payloads and the sign of zero count."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        shape, dtype = leaf
        size = int(np.prod(shape)) * dtype.itemsize
        return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)

    return jax.tree.map(one, SHAPES, is_leaf=is_leaf)


def make_abstract(mesh=None, specs=None):
    def one(path, leaf):
        spec = (specs or {}).get(jax.tree_util.keystr(path, simple=True, separator="/"), P())
        where = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(*leaf, sharding=where)

    return jax.tree_util.tree_map_with_path(one, SHAPES, is_leaf=is_leaf)


def same_bits(got, want):
    flat_got, flat_want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(flat_got) == len(flat_want)
    for a, b in zip(flat_got, flat_want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def write_all(out, values, skip=()):
    """Every leaf by the pieces that an importer has: layers, experts, gate and up, rows."""
    params = values["params"]
    out.write("params/scalar", (), params["scalar"])
    out.write("balance/router/bias", (), values["balance"]["router"]["bias"])
    for layer in range(2):
        out.write("params/norm", (layer, 0), params["norm"][layer, 0])
        q = params["stack"]["q"][layer, 0]
        for head in range(4):  # four writes into one chunk
            out.write("params/stack/q", (layer, 0, slice(None), head), q[:, head])
        for expert, half in itertools.product(range(4), range(2)):
            piece = np.array(params["stack"]["experts"]["gate_up"][layer, 0, expert, :, half])
            index = (layer, 0, expert, slice(None), half)
            if ("expert", layer, expert, half) not in skip:
                out.write("params/stack/experts/gate_up", index, piece)
            piece[...] = 0  # the caller may reuse its buffer
    out.write("params/embed/table", (slice(8, 16),), params["embed"]["table"][8:])
    out.write("params/embed/table", (slice(0, 8),), jnp.asarray(params["embed"]["table"][:8]))


def streamed(workdir, **more):
    return StreamedCheckpoint(workdir, make_abstract(), config=CONFIG, infos=INFOS, **more)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("streamed") / "run"
    plan = [(name, x.dtype, x.shape) for name, x in CARRIED.items()]
    with streamed(path, carried=plan) as out:
        write_all(out, make_values())
        for name, x in CARRIED.items():
            out.carry(name, x)
    return path


def test_it_reads_back_as_a_step_of_a_run(workdir):
    assert os.listdir(workdir) == ["checkpoints"]
    assert os.listdir(workdir / "checkpoints") == ["0"]
    values = make_values()
    restored = Checkpoints(workdir).restore(0, make_abstract())
    same_bits(restored.state, values)
    assert restored.step == 0 and read_config(workdir) == {"seed": 3, "model": {"dims": [1, 2]}}
    same_bits(Checkpoints.restore_weights(workdir, make_abstract()["params"]), values["params"])
    assert has_part(workdir / "checkpoints" / "0", "balance")
    assert not has_part(workdir / "checkpoints" / "0", "opt_state")


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
def test_it_reads_onto_a_mesh(workdir, sizes):
    mesh = jax.make_mesh(sizes, ("fsdp", "expert"))
    specs = {
        "params/embed/table": P(("fsdp", "expert")),
        "params/stack/experts/gate_up": P(None, None, "expert", "fsdp"),
        "params/stack/q": P(None, None, "fsdp", "expert"),
        "params/norm": P(None, None, "fsdp"),
    }
    parts = Checkpoints.restore_parts(workdir, make_abstract(mesh, specs))
    same_bits(parts, make_values())
    for got, want in zip(
        jax.tree.leaves(parts), jax.tree.leaves(make_abstract(mesh, specs)), strict=True
    ):
        assert got.sharding == want.sharding


def test_an_expert_is_a_file_of_its_own(workdir):
    """So a shard of a mesh reads its own layers and experts."""
    leaf = workdir / "checkpoints" / "0" / "params" / "stack.experts.gate_up"
    values = make_values()["params"]["stack"]["experts"]["gate_up"]
    files = [file for file in leaf.iterdir() if file.name != ".zarray"]
    assert len(files) == 2 * 4 * 2
    for file in files:
        layer, _, expert, _, half, _ = map(int, file.name.split("."))
        assert file.read_bytes() == values[layer, 0, expert, :, half].tobytes()


def test_carried_tensors_come_back_as_they_were(workdir, tmp_path):
    carried = read_carried(workdir / "checkpoints" / "0")
    assert set(carried.tensors) == set(CARRIED)
    for name, x in CARRIED.items():
        same_bits(carried.read(name), x)
    with streamed(tmp_path) as out:
        write_all(out, make_values())
        with pytest.raises(CheckpointError, match="nothing to carry"):
            out.carry("mtp.w", CARRIED["mtp.w"])
    assert read_carried(tmp_path / "checkpoints" / "0") is None


@pytest.mark.parametrize(
    "victim", ["params/embed.table/0.0", "carried/carried.safetensors", "rest/_METADATA"]
)
@pytest.mark.parametrize("how", ["flip", "remove"])
def test_damage_is_named(workdir, tmp_path, victim, how):
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "0" / victim
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if how == "remove" else path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{pathlib.Path(victim).name}.*"):
        Checkpoints.restore_parts(tmp_path / "run", make_abstract())


def test_a_run_goes_on_beside_it(workdir, tmp_path):
    """Orbax, which saves the steps of a run, takes the step for one of its own."""
    shutil.copytree(workdir, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    state = jax.tree.map(jnp.asarray, make_values(1))
    assert checkpoints.save(7, state, position={}, config=CONFIG)
    checkpoints.close()
    assert Checkpoints(tmp_path / "run").all_steps() == [0, 7]
    same_bits(Checkpoints(tmp_path / "run").restore(0, make_abstract()).state, make_values())
    same_bits(Checkpoints(tmp_path / "run").restore(7, make_abstract()).state, make_values(1))


@pytest.mark.parametrize("cause", ["left out", "interrupt", "carried", "shape"])
@pytest.mark.parametrize("existing", [False, True])
def test_nothing_stays_of_a_failed_write(tmp_path, cause, existing):
    workdir = tmp_path / "run"
    if existing:
        workdir.mkdir()
        (workdir / "mine.txt").write_text("keep")
    kind = KeyboardInterrupt if cause == "interrupt" else CheckpointError
    plan = [("mtp.w", "U8", (6,))] if cause == "carried" else []
    with pytest.raises(kind) as error, streamed(workdir, carried=plan) as out:
        write_all(out, make_values(), {("expert", 1, 2, 0)} if cause == "left out" else ())
        if cause == "interrupt":
            raise KeyboardInterrupt
        if cause == "shape":
            out.write("params/norm", (0, 0), np.zeros(7, np.float32))
    assert os.listdir(tmp_path) == (["run"] if existing else [])
    assert not existing or os.listdir(workdir) == ["mine.txt"]
    if cause == "left out":
        assert "params/stack/experts/gate_up: 720 of 768" in str(error.value)


def test_a_wrong_piece_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt), streamed(tmp_path / "run") as out:
        norm = np.zeros(8, np.float32)
        out.write("params/norm", (0, 0), norm)
        for name, index, array, word in (
            ("params/none", (), norm, "no leaf"),
            ("norm", (), norm, "no leaf"),
            ("params/norm", (0, 0), norm, "twice"),
            ("params/norm", (1, 0), norm.astype(np.float64), "float64"),
            ("params/norm", (1, 0), norm[:4], "not float32"),
            ("params/norm", (2, 0), norm, "no index"),
            ("params/norm", (-1, 0), norm, "no index"),
            ("params/norm", (0, 0, 0, 0), norm, "4 dims"),
            ("params/norm", (1, 0, slice(0, 8, 2)), norm[:4], "no index"),
            ("params/norm", (1, 0, slice(4, 12)), norm, "not float32"),
        ):
            with pytest.raises(CheckpointError, match=word) as error:
                out.write(name, index, array)
            assert "\n" not in str(error.value)
        raise KeyboardInterrupt


def test_a_step_that_exists_is_left_alone(workdir):
    with pytest.raises(CheckpointError, match="exists"):
        streamed(workdir)
    assert os.listdir(workdir / "checkpoints") == ["0"]
    blocked = workdir / "checkpoints" / "0" / "checksums.json" / "run"
    with pytest.raises(CheckpointError, match="cannot be written"), streamed(blocked):
        pass


def test_chunks_are_matrices_of_at_most_64_mb():
    experts = ParamInfo("e", ("experts", "embed", None, "ffn"), stack=2, matrix=(-3, -1))
    assert chunk_shape((22, 3, 896, 3584, 2, 3072), 2, experts) == (1, 1, 1, 3584, 1, 3072)
    heads = ParamInfo("q", ("embed", "heads", None), stack=2, matrix=(-3, -1), head_axis=-2)
    assert chunk_shape((22, 3, 1024, 96, 128), 2, heads) == (1, 1, 1024, 96, 128)
    assert chunk_shape((22, 3, 7168, 96, 128), 4, heads) == (1, 1, 1195, 96, 128)
    table = chunk_shape((163840, 7168), 4)
    assert table[1] == 7168 and table[0] * 7168 * 4 <= piecewise.MAX_CHUNK_BYTES
    assert chunk_shape((3, 1 << 26), 4) == (1, 1 << 24)
    assert chunk_shape((1000, 1 << 20), 1) == (63, 1 << 20)
    assert chunk_shape((), 4) == () and chunk_shape((0, 5), 4) == (1, 5)


def test_a_leaf_larger_than_a_chunk_is_sent_in_parts(tmp_path, monkeypatch):
    """Pieces that begin and end inside chunks come out whole."""
    monkeypatch.setattr(piecewise, "MAX_CHUNK_BYTES", 4 * 30)
    big = np.arange(50 * 7, dtype=np.float32).reshape(50, 7)
    abstract = {"params": {"w": jax.ShapeDtypeStruct(big.shape, big.dtype)}}
    with StreamedCheckpoint(tmp_path, abstract, config={}) as out:
        for first, last in ((21, 50), (0, 3), (3, 21)):
            out.write("params/w", (slice(first, last),), big[first:last])
    assert len(list((tmp_path / "checkpoints/0/params/w").iterdir())) == 1 + 13
    same_bits(Checkpoints.restore_weights(tmp_path, abstract["params"])["w"], big)


@pytest.mark.slow
def test_memory_holds_pieces_and_not_the_checkpoint(tmp_path):
    """2 GB of experts in pieces of 16 MB; the allocator keeps some buffers of writing threads."""

    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGESIZE"
        )

    shape = (4, 32, 2048, 4096)
    abstract = {"params": {"w": jax.ShapeDtypeStruct(shape, BF16)}}
    info = {"w": ParamInfo("w", ("experts", "embed", "ffn"), stack=1, matrix=(-2, -1))}
    piece = np.ones(shape[2:], BF16)
    peak = 0
    with StreamedCheckpoint(tmp_path, abstract, config={}, infos=info) as out:
        for layer, expert in itertools.product(range(4), range(32)):
            out.write("params/w", (layer, expert), piece)
            peak = max(peak, resident())
    assert peak < 1e9  # all of the process; about half of it when measured
