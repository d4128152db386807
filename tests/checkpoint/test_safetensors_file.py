"""Reading gives what the format's own library wrote; a wrong header is refused in one line."""

import json
import os
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moejax.checkpoint import CheckpointError
from moejax.checkpoint.safetensors_file import DTYPES, SafetensorsFile, SafetensorsWriter


def arrays():
    rng = np.random.default_rng(0)
    half = rng.integers(0, 2**16, (5, 7), dtype=np.uint16).view(ml_dtypes.bfloat16)
    return {
        "w": rng.normal(size=(6, 3, 2)).astype(np.float32),
        "half": half,
        "odd": np.arange(13, dtype=np.uint8),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), np.int32),
        "flag": np.array([True, False]),
    }


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def refused(path):
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(path)
    text = str(error.value)
    assert "\n" not in text and path.name in text and len(text) < 600
    return text


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def test_reads_what_the_library_wrote(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(arrays(), path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(arrays()) and file.metadata == {"format": "pt"}
    for name, want in arrays().items():
        got = file.read(name)
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.tobytes() == want.tobytes() == bytes(file.raw(name))
        got[...] = 0  # the caller's own


def test_rows_are_read_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    big = np.arange(4000 * 1000, dtype=np.float32).reshape(4000, 1000)
    save_file({"big": big, "scalar": np.array(1.0)}, path)
    file = SafetensorsFile(path)
    tracemalloc.start()
    got = file.read("big", slice(3990, 5000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(got, big[3990:]) and peak < 3 * got.nbytes
    for rows in (slice(None), slice(-2, None), slice(5, 2), slice(0, 0)):
        assert np.array_equal(file.read("big", rows), big[rows])
    for name, rows in (("scalar", slice(0, 1)), ("big", slice(0, 8, 2)), ("none", None)):
        with pytest.raises(CheckpointError, match=f"a.safetensors.*{name}"):
            file.read(name, rows)


def test_the_library_reads_what_was_written(tmp_path):
    path = tmp_path / "a.safetensors"
    plan = [(name, x.dtype, x.shape) for name, x in arrays().items()]
    writer = SafetensorsWriter(path, plan)
    for name, x in reversed(arrays().items()):
        writer.add(name, x.tobytes() if name == "odd" else x)
    writer.close()
    loaded = load_file(path)
    for name, want in arrays().items():
        assert loaded[name].dtype == want.dtype and loaded[name].tobytes() == want.tobytes()
    file = SafetensorsFile(path)
    assert all(i.start % DTYPES[i.dtype].itemsize == 0 for i in file.tensors.values())
    assert file.metadata == {"format": "pt"}


def test_every_type_survives(tmp_path):
    data = {n: np.arange(32, dtype=np.uint8).view(d) for n, d in DTYPES.items() if n != "BOOL"}
    writer = SafetensorsWriter(tmp_path / "a", [(n, n, x.shape) for n, x in data.items()])
    for name, x in data.items():
        writer.add(name, x)
    writer.close()
    file = SafetensorsFile(tmp_path / "a")
    for name, x in data.items():
        assert file.info(name).dtype == name and file.read(name).tobytes() == x.tobytes()
        assert file.read(name).dtype == x.dtype


def test_the_writer_takes_what_was_planned_and_nothing_else(tmp_path):
    writer = SafetensorsWriter(tmp_path / "a", [("x", "BF16", (2, 2)), ("y", np.int32, (1,))])
    for name, data in (
        ("z", b""), ("x", b"1234567"), ("x", np.zeros((2, 2), np.float32)),
        ("x", np.zeros(4, ml_dtypes.bfloat16)), ("y", np.zeros((1, 1), np.int32)),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"key '{name}'"):
            writer.add(name, data)
    writer.add("x", b"12345678")
    with pytest.raises(CheckpointError, match="written already"):
        writer.add("x", b"12345678")
    with pytest.raises(CheckpointError, match="'y': never written"):
        writer.close()
    with pytest.raises(CheckpointError, match="a cannot be written: File exists"):
        SafetensorsWriter(tmp_path / "a", [])
    with pytest.raises(CheckpointError, match="twice"):
        SafetensorsWriter(tmp_path / "b", [("x", "F32", (1,)), ("x", "F32", (1,))])
    with pytest.raises(CheckpointError, match="complex64"):
        SafetensorsWriter(tmp_path / "b", [("x", np.complex64, (1,))])


def test_a_huge_length_is_refused_without_allocating(tmp_path):
    path = write_raw(tmp_path / "a.safetensors", b"{}" + b" " * 1000, length=10 << 30)
    tracemalloc.start()
    assert str(10 << 30) in refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    sparse = tmp_path / "b.safetensors"
    sparse.write_bytes((200_000_000).to_bytes(8, "little"))
    os.truncate(sparse, 300_000_000)  # as long as it says, yet over the limit
    assert "limit" in refused(sparse)


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"", b"", "not JSON"),
        (b"[]", b"", "object"),
        (b"\xff\xfe", b"", "not JSON"),
        (b"[" * 100_000, b"", "nested|not JSON"),
        (b'{"a":1,"a":1}', b"", "'a' stands there twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "twice"),
        ({"a": 1}, b"", "key 'a': needs"),
        ({"a": {"dtype": "F32"}}, b"", "needs"),
        ({"a": entry(extra=1)}, bytes(8), "needs"),
        ({"a": entry("F31")}, bytes(8), "F31"),
        ({"a": entry(["F32"])}, bytes(8), "dtype"),
        ({"a": entry(shape=(-2,))}, bytes(8), "-2"),
        ({"a": entry(shape=(2.0,))}, bytes(8), "2.0"),
        ({"a": entry(shape=(True, 2))}, bytes(8), "True"),
        ({"a": entry(shape=[1] * 33 + [2])}, bytes(8), "at most 32"),
        ({"a": entry(shape=(2**70,))}, bytes(8), "not a size"),
        ({"a": entry(shape=(2**40, 2**40))}, bytes(8), "too many"),
        ({"a": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}, b"", "too many"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "span"),
        ({"a": entry(offsets=(0, 7))}, bytes(7), "span"),
        ({"a": entry(offsets=(0, 8, 8))}, bytes(8), "at most 2"),
        ({"a": entry(offsets=(0,))}, bytes(8), "span"),
        ({"a": entry()}, bytes(7), "cut short"),
        ({"a": entry()}, bytes(9), "1 bytes at its end"),
        ({"a": entry(offsets=(4, 12))}, bytes(12), "hole"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "'b': its data overlaps"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "'b'.*hole"),
        ({"__metadata__": {"a": 1}}, b"", "text to text"),
        ({"a\nb" * 100: entry("?")}, bytes(8), "dtype"),
    ],
)  # fmt: skip
def test_a_wrong_header_is_refused_by_file_and_key(tmp_path, header, data, reason):
    text = refused(write_raw(tmp_path / "model-1.safetensors", header, data))
    assert re.search(reason, text)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"1234567")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("short", "folder", "pipe", "absent"):
        refused(tmp_path / name)


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.ones(100, np.float32)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="became shorter"):
        file.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match="a.safetensors, key 'a': cannot be read"):
        file.read("a")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
sizes = st.integers(-2, 40) | st.sampled_from([2**31, 2**62, 2**63, 2**64]) | json_values
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4"]) | json_values,
        "shape": st.lists(sizes, max_size=3) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=6), entries | json_values, max_size=4).map(
    lambda value: json.dumps(value).encode()
)


def only_checkpoint_errors(path):
    """A file that opens must also read; anything but CheckpointError fails the test."""
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    assert sum(file.read(name).nbytes for name in file.tensors) <= path.stat().st_size


fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzz
@given(headers, st.binary(max_size=40), st.none() | st.integers(0, 2**64 - 1))
def test_any_header_gives_tensors_or_a_checkpoint_error(tmp_path, header, data, length):
    only_checkpoint_errors(write_raw(tmp_path / "f", header, data, length))


@fuzz
@given(st.data())
def test_a_changed_byte_gives_tensors_or_a_checkpoint_error(tmp_path, data):
    path = tmp_path / "f"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.arange(3, dtype=np.int64)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    only_checkpoint_errors(path)
