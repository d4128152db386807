"""Exact resume from every source and from a mixture of them all, with and without workers."""

import json

import numpy as np
import pytest

from moejax.config.load import as_run_config
from moejax.data.build_cache import prepare
from moejax.data.pipeline import make_train_iterator
from moejax.data.sources import load_corpus
from moejax.data.tokenize import ByteTokenizer

BYTES = ByteTokenizer()
NAMES = ("parquet", "hf_dataset", "array_record", "array_record_json", "cache", "mixture")


@pytest.fixture(scope="module")
def sources(formats, tmp_path_factory):
    """Name -> data config; documents are longer than a row, so most positions lie inside one."""
    values = {"seq_len": 64, "batch_size": 4, "prefetch": 2, "tokenizer": "byte"}
    folder = tmp_path_factory.mktemp("resume") / "cache"
    prepare(as_run_config({"data": values | formats["parquet"]}).data, folder, shard_bytes=2000)
    all_ = formats | {"cache": {"source": "cache", "paths": (str(folder),)}}
    mixture = [
        {"name": name, "weight": weight, **source}
        for weight, (name, source) in enumerate(all_.items(), start=1)
    ]
    configs = all_ | {"mixture": {"mixture": mixture}}
    return {name: as_run_config({"data": values | source}).data for name, source in configs.items()}


def iterator_of(cfg, **kwargs):
    return make_train_iterator(cfg, BYTES, load_corpus(cfg, "train"), seed=11, **kwargs)


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        for key in ("tokens", "segment_ids", "labels"):
            np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_bit_for_bit(sources, name):
    """In the middle of the first epoch, at its end, and in the second."""
    cfg = sources[name]
    whole = iterator_of(cfg)
    per_epoch = -(-whole.get_state()["rows_per_epoch"] // cfg.batch_size)
    want = take(whole, per_epoch + 8)
    for step in (1, per_epoch - 1, per_epoch + 3):
        iterator = iterator_of(cfg)
        take(iterator, step)
        state = json.loads(json.dumps(iterator.get_state()))
        assert_same(take(iterator_of(cfg, start_state=state), 4), want[step : step + 4])


def test_workers_read_a_mixture_of_everything_the_same_and_resume(sources):
    cfg = sources["mixture"]
    want = take(iterator_of(cfg), 9)
    iterator = iterator_of(cfg.replace(num_workers=2))
    got = [next(iterator) for _ in range(4)]
    iterator.set_state(json.loads(json.dumps(iterator.get_state())))
    assert_same(got + take(iterator, 5), want)


@pytest.mark.parametrize("count", [2, 4])
def test_a_mixture_is_the_same_for_any_number_of_processes(sources, count):
    cfg = sources["mixture"]
    iterator = iterator_of(cfg)
    take(iterator, 3)
    want = take(iterator, 2)
    iterator.set_state(iterator.get_state() | {"rows": 12})
    state = iterator.get_state()
    parts = [take(iterator_of(cfg, shard=(i, count), start_state=state), 2) for i in range(count)]
    joined = [
        {key: np.concatenate([part[step][key] for part in parts]) for key in want[0]}
        for step in range(2)
    ]
    assert_same(joined, want)


def test_another_batch_size_and_seq_len(sources):
    cfg = sources["mixture"]
    iterator = iterator_of(cfg)
    take(iterator, 3)
    want = take(iterator, 2)
    state = iterator.get_state() | {"rows": 12}
    (wide,) = take(iterator_of(cfg.replace(batch_size=8), start_state=state), 1)
    np.testing.assert_array_equal(
        wide["tokens"], np.concatenate([batch["tokens"] for batch in want])
    )
    longer = iterator_of(cfg.replace(seq_len=128), start_state=state)
    rows = longer.get_state()["mixture"]["member_rows"]
    for name, before in state["mixture"]["member_rows"].items():
        assert abs(2 * rows[name] - before) <= 9
