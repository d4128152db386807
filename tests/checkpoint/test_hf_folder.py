"""A model folder is whole or refused by file and key; what is written is whole or not there."""

import json
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moejax.checkpoint import CheckpointError
from moejax.checkpoint.hf_folder import INDEX, SINGLE, HfFolder, HfWriter, read_index

ORACLES = pathlib.Path(__file__).parents[1] / "fixtures" / "oracles"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    A: {"a.w": np.ones((4, 3), np.float32), "a.b": np.arange(3, dtype=np.int32)},
    B: {"b.w": np.full((2, 2), 7, ml_dtypes.bfloat16)},
}


def write_index(folder, weight_map, **more):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for file, tensors in TENSORS.items():
        save_file(tensors, path / file)
    write_index(path, {key: file for file, tensors in TENSORS.items() for key in tensors})
    (path / "config.json").write_text('{"model_type": "x"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenization_x.py").write_text("raise SystemExit")
    return path


def refused(path, *words):
    with pytest.raises(CheckpointError) as error:
        HfFolder(path)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_folder_of_shards(folder):
    hf = HfFolder(folder)
    assert hf.keys() == {"a.w": ("F32", (4, 3)), "a.b": ("I32", (3,)), "b.w": ("BF16", (2, 2))}
    assert hf.total_bytes == 48 + 12 + 8
    assert hf.config == {"model_type": "x"}
    assert [p.name for p in hf.tokenizer_files()] == ["tokenizer.json"]
    assert hf.file_of("b.w") == folder / B
    for tensors in TENSORS.values():
        for key, want in tensors.items():
            assert hf.read(key).tobytes() == want.tobytes() == bytes(hf.raw(key))
    assert np.array_equal(hf.read("a.w", slice(1, 3)), np.ones((2, 3)))
    with pytest.raises(CheckpointError, match="'c'"):
        hf.read("c")


def test_a_folder_of_one_file(tmp_path):
    save_file(TENSORS[A], tmp_path / "weights.safetensors")
    assert set(HfFolder(tmp_path).keys()) == set(TENSORS[A])
    save_file(TENSORS[B], tmp_path / SINGLE)
    assert set(HfFolder(tmp_path).keys()) == set(TENSORS[B])
    save_file(TENSORS[B], tmp_path / "other.safetensors")
    (tmp_path / SINGLE).unlink()
    refused(tmp_path, "2 .safetensors files", INDEX)
    refused(tmp_path / "absent", "absent is not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "0 .safetensors files")


def test_index_and_shards_must_name_the_same(folder):
    whole = {key: file for file, tensors in TENSORS.items() for key in tensors}
    write_index(folder, {**whole, "c": A})
    refused(folder, A, "'c'", "no key")
    write_index(folder, {key: file for key, file in whole.items() if key != "a.b"})
    refused(folder, A, "'a.b'", "not in")
    write_index(folder, {**whole, "c": "model-3.safetensors"})
    refused(folder, "model-3.safetensors", "missing")
    save_file({**TENSORS[B], "a.b": np.zeros(1)}, folder / B)  # in both, the index says A
    write_index(folder, whole)
    refused(folder, B, "'a.b'", "not in")


def test_damaged_shards_are_named(folder):
    data = (folder / B).read_bytes()
    (folder / B).write_bytes(data[:-1])
    refused(folder, B, "'b.w'", "cut short")
    (folder / B).write_bytes((10 << 30).to_bytes(8, "little") + data[8:])
    refused(folder, B, str(10 << 30))
    (folder / B).unlink()
    refused(folder, B, "missing")


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", ".", "", "x.bin",
     ".safetensors", "..\\x.safetensors", "c:x.safetensors", "x\0.safetensors", "x\n.safetensors",
     "x" * 300 + ".safetensors", "\ud800.safetensors", 5, None, ["x.safetensors"]],
    ids=ascii,
)  # fmt: skip
def test_an_index_cannot_leave_the_folder(folder, name):
    save_file(TENSORS[A], folder.parent / "x.safetensors")
    (folder / "sub").mkdir()
    save_file(TENSORS[A], folder / "sub" / "x.safetensors")
    write_index(folder, {"a.w": name, "a.b": name})
    refused(folder, INDEX, "'a.w'")


def test_a_link_made_by_the_owner_of_the_disk_is_followed(folder):
    """As in Hugging Face's cache: plain names that lead to ../blobs/<hash>."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    os.rename(folder / A, blobs / "0123")
    os.symlink("../blobs/0123", folder / A)
    assert np.array_equal(HfFolder(folder).read("a.w"), np.ones((4, 3)))
    (blobs / "0123").unlink()
    refused(folder, A, "missing")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"weight_map": []}', "{}", '{"weight_map": {"a": "x.safetensors", "a": "y"}}',
     '{"weight_map": {}, "weight_map": {}}', "[" * 99999, "\ud800"],
    ids=lambda text: ascii(text)[:20],
)  # fmt: skip
def test_a_wrong_index_is_refused(folder, text):
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder, INDEX)


def test_config_has_a_limit(folder):
    (folder / "config.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="config.json"):
        _ = HfFolder(folder).config
    os.truncate(folder / "config.json", 1 << 30)
    with pytest.raises(CheckpointError, match="config.json is larger"):
        _ = HfFolder(folder).config


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from([A, B, "../x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
weight_maps = st.dictionaries(st.text(max_size=6), json_values, max_size=4)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | weight_maps.map(lambda value: json.dumps({"weight_map": value}).encode())
)
def test_any_index_gives_plain_names_or_a_checkpoint_error(tmp_path, data):
    path = tmp_path / INDEX
    path.write_bytes(data)
    try:
        names = read_index(path).values()
    except CheckpointError as error:
        assert "\n" not in str(error) and INDEX in str(error)
    else:
        assert all((tmp_path / name).parent == tmp_path for name in names)


def copied(source, out, limit):
    plan = [(key, dtype, shape) for key, (dtype, shape) in source.keys().items()]
    with HfWriter(out, plan, max_shard_bytes=limit) as writer:
        for key in reversed(source.keys()):
            writer.add(key, source.read(key))
        writer.write_json("config.json", source.config)


@pytest.mark.parametrize("family", ["k3_mxfp4", "deepseek_v32_fp8", "k3_text"])
@pytest.mark.parametrize("limit", [5 * 10**9, 100_000])
def test_a_copy_is_equal_bit_for_bit(tmp_path, family, limit):
    source = HfFolder(ORACLES / family)
    copied(source, tmp_path / "out", limit)
    again = HfFolder(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert again.keys() == source.keys() and again.config == source.config
    assert all(bytes(again.raw(key)) == bytes(source.raw(key)) for key in source.keys())
    if limit > source.total_bytes:
        assert list(again.files) == [SINGLE] and not (tmp_path / "out" / INDEX).exists()
        return
    count = len(again.files)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert sorted(again.files) == names and count > 3
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == source.total_bytes
    for file in again.files.values():
        sizes = [info.nbytes for info in file.tensors.values()]
        assert sum(sizes) <= limit or len(sizes) == 1
        if not any(info.dtype == "F8_E4M3" for info in file.tensors.values()):
            assert set(load_file(file.path)) == set(file.tensors)


PLAN = [("x", "F32", (2,)), ("y", "F32", (2,))]


@pytest.mark.parametrize("cause", ["left out", "wrong shape", "interrupt"])
def test_nothing_stays_of_a_failed_write(tmp_path, cause):
    kinds = (KeyboardInterrupt,) if cause == "interrupt" else (CheckpointError,)
    with pytest.raises(kinds), HfWriter(tmp_path / "out", PLAN, max_shard_bytes=8) as writer:
        writer.add("x", np.zeros(2, np.float32))
        assert writer.folder.is_dir() and not (tmp_path / "out").exists()
        if cause == "wrong shape":
            writer.add("y", np.zeros(3, np.float32))
        if cause == "interrupt":
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with HfWriter(out, PLAN) as writer:  # an empty one may be filled
        for key, _, _ in PLAN:
            writer.add(key, bytes(8))
    before = (out / SINGLE).read_bytes()
    with pytest.raises(CheckpointError, match="not empty"):
        HfWriter(out, PLAN)
    assert (out / SINGLE).read_bytes() == before and os.listdir(tmp_path) == ["out"]
    for plan, limit in ((PLAN + PLAN, 10), ([("x", "F4", (1,))], 10), (PLAN, 0)):
        with pytest.raises(CheckpointError):
            HfWriter(tmp_path / "new", plan, max_shard_bytes=limit)
    with pytest.raises(CheckpointError, match="cannot be made"):
        with HfWriter(out / SINGLE / "new", PLAN):
            pass
