"""Token caches: the same rows as from the text, made in pieces, refused when they do not fit."""

import json
import pickle

import numpy as np
import pytest

from moejax.config import ConfigError, DataConfig
from moejax.config.load import as_run_config
from moejax.data import shards
from moejax.data.build_cache import prepare
from moejax.data.cache import TokenShards
from moejax.data.packing import tokenize_corpus
from moejax.data.pipeline import make_train_iterator
from moejax.data.sources import load_corpus
from moejax.data.tokenize import ByteTokenizer, get_tokenizer
from tests.data.formats import TEXTS, write_parquet

BYTES = ByteTokenizer()
# Some four documents a shard.
SHARD_BYTES = 2000


def cache_config(folder, **changes):
    return DataConfig(source="cache", paths=(str(folder),), tokenizer="byte", **changes)


@pytest.fixture(scope="module")
def text_config(formats):
    return DataConfig(**formats["parquet"], tokenizer="byte", validation_percent=20.0)


@pytest.fixture(scope="module")
def cache(text_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "parquet"
    (report,) = prepare(text_config, folder, shard_bytes=SHARD_BYTES)
    return folder, report


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "report.json"}


def test_a_report_counts_documents_tokens_and_bytes(cache):
    _, report = cache
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (report.documents, report.bytes) == (60, num_bytes)
    assert report.tokens == num_bytes + 60
    assert report.tokens_per_byte == pytest.approx(1 + 60 / num_bytes)
    assert sum(split["tokens"] for split in report.splits.values()) == report.tokens
    assert json.loads(json.dumps(report.as_json()))["documents"] == 60


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_cache_holds_the_tokens_of_the_text(cache, text_config, split):
    folder, report = cache
    cfg = cache_config(folder)
    corpus, text = load_corpus(cfg, split), load_corpus(text_config, split)
    assert (len(corpus), corpus.num_bytes) == (len(text), text.num_bytes)
    documents, want = tokenize_corpus(BYTES, corpus), tokenize_corpus(BYTES, text)
    np.testing.assert_array_equal(documents.starts, want.starts)
    np.testing.assert_array_equal(documents.tokens[:], want.tokens[:])
    assert len(list(folder.glob("train-*.tokens.npy"))) > 5
    assert np.load(folder / "train-00000.tokens.npy").dtype == np.uint16


def test_rows_from_a_cache_are_those_from_the_text(cache, text_config):
    folder, _ = cache
    rows = []
    for cfg in (
        cache_config(folder, seq_len=96, batch_size=4),
        text_config.replace(seq_len=96, batch_size=4),
    ):
        iterator = make_train_iterator(cfg, BYTES, load_corpus(cfg, "train"), seed=3)
        rows.append([next(iterator)["tokens"].tolist() for _ in range(4)])
        iterator.close()
    assert rows[0] == rows[1]


def test_an_interrupted_preparation_goes_on(text_config, cache, tmp_path, monkeypatch):
    """Killed in its fourth shard it leaves three, makes the others, and the whole is the same."""
    made, make_shard = [], shards.make_shard

    def killed(shard, *args):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(shard.name)
        return make_shard(shard, *args)

    monkeypatch.setattr("moejax.data.build_cache.make_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(text_config, tmp_path, shard_bytes=SHARD_BYTES)
    with pytest.raises(ConfigError, match="no finished cache"):
        load_corpus(cache_config(tmp_path), "train")
    before = {name: (tmp_path / f"{name}.tokens.npy").stat().st_mtime_ns for name in made}
    # A shard without its counts is one that was being written.
    (tmp_path / f"{made[-1]}.json").unlink()
    (tmp_path / f"{made[-1]}.tokens.npy").write_bytes(b"half")
    monkeypatch.undo()
    (report,) = prepare(text_config, tmp_path, shard_bytes=SHARD_BYTES)
    assert report.reused == 2
    assert all((tmp_path / f"{n}.tokens.npy").stat().st_mtime_ns == before[n] for n in made[:2])
    assert contents(tmp_path) == contents(cache[0])


def test_processes_make_the_same_cache(text_config, cache, tmp_path):
    seen = []
    prepare(
        text_config,
        tmp_path,
        workers=2,
        shard_bytes=SHARD_BYTES,
        progress=lambda *a: seen.append(a),
    )
    assert contents(tmp_path) == contents(cache[0])
    done, total = np.array(seen).T
    assert (np.diff(done) > 0).all() and done[-1] == cache[1].bytes
    assert (done <= total).all()


def test_an_error_in_a_worker_is_one_line_and_nothing_half_written(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    bad = tmp_path / "b.parquet"
    write_parquet(bad, TEXTS)
    cfg = DataConfig(source="parquet", paths=(str(bad),), text_field="none")
    with pytest.raises(ConfigError, match="no column 'none'"):
        prepare(cfg, tmp_path / "out")
    with pytest.raises(ConfigError, match="nowhere"):
        prepare(cfg.replace(text_field="text", tokenizer="nowhere.json"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_data_is_left_alone(cache, text_config, tmp_path):
    folder, _ = cache
    before = contents(folder)
    with pytest.raises(ConfigError, match="other data"):
        prepare(text_config.replace(validation_percent=50.0), folder, shard_bytes=SHARD_BYTES)
    write_parquet(tmp_path / "b.parquet", TEXTS[::-1])
    with pytest.raises(ConfigError, match="other data"):
        prepare(text_config.replace(paths=(str(tmp_path / "b.parquet"),)), folder)
    assert contents(folder) == before


def test_a_cache_of_another_tokenizer_is_refused(text_config, tmp_path, cache):
    cfg = text_config.replace(tokenizer="bpe", bpe_vocab_size=300)
    (report,) = prepare(cfg, tmp_path / "bpe", shard_bytes=SHARD_BYTES)
    assert report.tokens < report.bytes
    corpus = load_corpus(cache_config(tmp_path / "bpe"), "train")
    with pytest.raises(
        ConfigError, match="made with the tokenizer .*Set data.tokenizer="
    ) as caught:
        tokenize_corpus(BYTES, corpus)
    assert "\n" not in str(caught.value)
    own = cache_config(tmp_path / "bpe").replace(tokenizer=str(tmp_path / "bpe" / "tokenizer.json"))
    documents = tokenize_corpus(get_tokenizer(own, None), corpus)
    assert get_tokenizer(own, None).decode(documents.tokens[: documents.starts[1] - 1]) == next(
        iter(load_corpus(cfg, "train").texts)
    )
    with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
        get_tokenizer(own.replace(tokenizer="bpe"), None)
    both = own.replace(paths=(str(tmp_path / "bpe"), str(cache[0])))
    with pytest.raises(ConfigError, match="different tokenizers"):
        load_corpus(both, "train")


def test_a_mixture_gets_a_cache_a_member(formats, tmp_path):
    mixture = [
        {"name": "tables", **formats["parquet"], "weight": 3.0},
        {"name": "made", "source": "synthetic", "synthetic_docs": 40},
    ]
    cfg = as_run_config({"data": {"mixture": mixture, "tokenizer": "byte", "seq_len": 64}}).data
    reports = prepare(cfg, tmp_path / "mix")
    assert [(report.name, report.documents) for report in reports] == [("tables", 60), ("made", 40)]
    with pytest.raises(ConfigError, match="It holds the caches .*made"):
        load_corpus(cache_config(tmp_path / "mix"), "train")
    values = {"mixture": json.loads((tmp_path / "mix" / "mixture.json").read_text())}
    cached = as_run_config({"data": values | {"tokenizer": "byte", "seq_len": 64}}).data
    assert [member.weight for member in cached.mixture] == [3.0, 1.0]
    batches = [
        next(make_train_iterator(c, BYTES, load_corpus(c, "train"), seed=1)) for c in (cfg, cached)
    ]
    np.testing.assert_array_equal(batches[0]["tokens"], batches[1]["tokens"])
    with pytest.raises(ConfigError, match="nothing to prepare"):
        prepare(cached, tmp_path / "again")


@pytest.mark.parametrize("what", ["tokens", "lengths"])
def test_damaged_shards_are_named(text_config, tmp_path, what):
    prepare(text_config, tmp_path, shard_bytes=SHARD_BYTES)
    path = tmp_path / f"train-00001.{what}.npy"
    whole = path.read_bytes()
    for data in (whole[:-4], whole[:50], b""):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"train-00001.{what}.npy"):
            load_corpus(cache_config(tmp_path), "train")
    path.unlink()
    with pytest.raises(ConfigError, match=f"train-00001.{what}.npy"):
        load_corpus(cache_config(tmp_path), "train")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 9}'])
def test_a_manifest_that_is_none_is_named(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="manifest.json"):
        load_corpus(cache_config(tmp_path), "train")


def test_shards_read_as_one_array_and_pickle_as_paths(tmp_path):
    arrays = [np.arange(n, dtype=np.uint16) + 100 * n for n in (5, 0, 1, 7)]
    for place, array in enumerate(arrays):
        np.save(tmp_path / f"{place}.npy", array)
    mapped = [
        np.load(tmp_path / f"{n}.npy", mmap_mode="r") if n != 1 else arrays[1] for n in range(4)
    ]
    tokens, whole = TokenShards(mapped), np.concatenate(arrays)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])
    large = np.lib.format.open_memmap(tmp_path / "l.npy", "w+", np.uint16, (1 << 20,))
    large[-3:] = 7
    sent = pickle.dumps(TokenShards([np.load(tmp_path / "l.npy", mmap_mode="r")]))
    assert len(sent) < 1000
    assert pickle.loads(sent)[(1 << 20) - 4 :].tolist() == [0, 7, 7, 7]
