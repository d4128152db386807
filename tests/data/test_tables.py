"""Parquet, saved datasets, ArrayRecord: the documents, the splits, and what bad files say."""

import builtins
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from moejax.config import ConfigError, DataConfig
from moejax.data.corpus import CHUNK, LazyTexts
from moejax.data.evaluation import make_eval_batches
from moejax.data.records import RecordReader
from moejax.data.sources import load_corpus, open_documents
from moejax.data.tables import HfReader, ParquetReader
from moejax.data.tokenize import ByteTokenizer
from tests.data.formats import TEXTS, write_parquet, write_records, write_saved_dataset

SAVED = Path(__file__).parents[1] / "fixtures" / "hf_dataset"
SOURCES = ("parquet", "hf_dataset", "array_record", "array_record_json")


def config(source, *paths, **changes):
    return DataConfig(source=source, paths=tuple(map(str, paths)), **changes)


def error_of(cfg, split="train"):
    with pytest.raises(ConfigError) as caught:
        load_corpus(cfg, split)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_gives_the_same_documents_in_order(formats, source):
    corpus = load_corpus(DataConfig(**formats[source]), "all")
    assert list(corpus.texts) == TEXTS and len(corpus) == len(TEXTS)
    assert corpus.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert corpus.texts[7] == TEXTS[7] and corpus.texts[::9] == tuple(TEXTS[::9])
    assert len(set(corpus.names)) == len(TEXTS)


@pytest.mark.parametrize("source", SOURCES)
def test_splits_divide_the_documents_by_their_names(formats, source):
    cfg = DataConfig(**formats[source], validation_percent=20.0)
    train, validation = load_corpus(cfg, "train"), load_corpus(cfg, "validation")
    assert sorted([*train.texts, *validation.texts]) == sorted(TEXTS)
    assert 2 <= len(validation) <= 25 and not set(train.names) & set(validation.names)
    assert load_corpus(cfg, "train").sha256 == train.sha256 != validation.sha256


@pytest.mark.parametrize("source", SOURCES)
def test_a_document_is_read_without_the_others(formats, source):
    documents = open_documents(DataConfig(**formats[source]), "all")
    assert isinstance(documents, LazyTexts)
    assert documents.reader.texts([59, 0, 31]) == [TEXTS[59], TEXTS[0], TEXTS[31]]
    again = pickle.loads(pickle.dumps(documents.reader))
    assert again.texts([12]) == [TEXTS[12]] and again.name(40) == documents.reader.name(40)


def test_parquet_reads_one_row_group_for_one_row(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    reader = ParquetReader({str(tmp_path / "a.parquet"): "a"}, "text")
    groups, read = [], pa.parquet.ParquetFile.read_row_group

    def counted(self, group, **kwargs):
        groups.append(group)
        return read(self, group, **kwargs)

    monkeypatch.setattr(pa.parquet.ParquetFile, "read_row_group", counted)
    assert reader.texts([30, 31, 29]) == [TEXTS[30], TEXTS[31], TEXTS[29]]
    assert groups == [4]  # rows 28 to 34


@pytest.mark.parametrize("name", ["plain", "splits"])
def test_folders_that_the_datasets_library_saved(name):
    """Both were written by `datasets` 5: `plain` in two files, `splits` as train and test."""
    whole = [f"document {i}: " + "zwölf Boxkämpfer jagen Viktor. " * (1 + i % 3) for i in range(12)]
    cfg = config("hf_dataset", SAVED / name, validation_split="test", validation_percent=30.0)
    train, test = load_corpus(cfg, "train"), load_corpus(cfg, "validation")
    assert sorted([*train.texts, *test.texts]) == sorted(whole)
    if name == "splits":
        assert list(train.texts) == whole[:8] and list(test.texts) == whole[8:]
        assert test.names[0] == "splits/test:0"


def test_a_split_that_is_not_there_is_a_share_of_the_other():
    cfg = config("hf_dataset", SAVED / "splits", validation_percent=30.0)
    train, held_out = load_corpus(cfg, "train"), load_corpus(cfg, "validation")
    assert len(train) + len(held_out) == 8 and len(held_out)
    message = error_of(config("hf_dataset", SAVED / "splits", train_split="all"))
    assert "no split 'all'" in message and "train, test" in message


def test_held_out_paths_are_the_validation_split(tmp_path, formats):
    write_parquet(tmp_path / "held.parquet", ["held out"])
    cfg = DataConfig(**formats["parquet"], validation_paths=(str(tmp_path / "held.parquet"),))
    assert list(load_corpus(cfg, "validation").texts) == ["held out"]
    assert list(load_corpus(cfg, "train").texts) == TEXTS
    (tmp_path / "a.txt").write_text("to train on")
    (tmp_path / "b.txt").write_text("held out")
    files = config("files", tmp_path / "a.txt", validation_paths=(str(tmp_path / "b.txt"),))
    assert load_corpus(files, "train").texts == ("to train on",)
    assert load_corpus(files, "validation").texts == ("held out",)


def test_missing_and_empty_texts_are_left_out(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", None, "", "two"])
    corpus = load_corpus(config("parquet", tmp_path / "a.parquet"), "all")
    assert list(corpus.texts) == ["one", "two"]
    assert list(corpus.names) == ["a.parquet:0", "a.parquet:3"]


def test_more_documents_than_are_read_at_once(tmp_path):
    texts = [f"text {i}" for i in range(2 * CHUNK + 3)]
    write_records(tmp_path / "a.array_record", texts)
    assert (
        list(load_corpus(config("array_record", tmp_path / "*.array_record"), "all").texts) == texts
    )


def test_record_formats(tmp_path):
    path = tmp_path / "a.array_record"
    write_records(path, ["{not json", '{"text": "x"}'])
    assert list(load_corpus(config("array_record", path), "all").texts) == [
        "{not json",
        '{"text": "x"}',
    ]
    assert "record 0: not JSON" in error_of(
        config("array_record", path, record_format="json"), "all"
    )
    write_records(path, ['{"body": "x"}', "{}"])
    assert "it has: body" in error_of(config("array_record", path, text_field="txt"), "all")
    write_records(path, [b"fine", b"\xff\xfe"])
    assert "record 1: not UTF-8" in error_of(config("array_record", path), "all")


def test_a_missing_column_names_those_there_are(tmp_path, formats):
    message = error_of(DataConfig(**formats["parquet"], text_field="body"))
    assert "no column 'body'" in message and "id, text" in message and "a.parquet" in message
    assert "holds int64" in error_of(DataConfig(**formats["parquet"], text_field="id"))
    assert "text, id" in error_of(DataConfig(**formats["hf_dataset"], text_field="body"))


@pytest.mark.parametrize("source", ["parquet", "array_record", "cache", "hf_dataset"])
def test_missing_paths_and_globs_without_a_match_are_named(tmp_path, source):
    assert "data.paths" in error_of(config(source))
    assert "*.none" in error_of(config(source, tmp_path / "*.none"))


def test_damaged_files_are_named(tmp_path, formats):
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1" + bytes(400) + b"PAR1")
    assert "bad.parquet" in error_of(config("parquet", bad))
    write_parquet(bad, TEXTS)
    whole = bytearray(bad.read_bytes())
    whole[4 : len(whole) // 2] = bytes(len(whole) // 2 - 4)
    bad.write_bytes(whole)
    assert "bad.parquet: row group" in error_of(config("parquet", bad))
    record = tmp_path / "bad.array_record"
    record.write_bytes(b"x" * 100_000)
    assert "bad.array_record" in error_of(config("array_record", record))


def test_damaged_saved_datasets_are_named(tmp_path):
    folder = tmp_path / "saved"
    write_saved_dataset(folder, TEXTS)
    arrow = folder / "data-00001-of-00002.arrow"
    arrow.write_bytes(arrow.read_bytes()[:300])
    assert arrow.name in error_of(config("hf_dataset", folder))
    arrow.unlink()
    assert f"{arrow.name} is missing" in error_of(config("hf_dataset", folder))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    assert "outside of the folder" in error_of(config("hf_dataset", folder))
    (folder / "state.json").write_text('{"_data_files": 3}')
    assert "lists no data files" in error_of(config("hf_dataset", folder))
    shutil.rmtree(folder)
    folder.mkdir()
    assert "no saved dataset" in error_of(config("hf_dataset", folder))


def test_empty_tables_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", [])
    assert "no column" not in error_of(config("parquet", tmp_path / "a.parquet", text_field="id"))
    write_parquet(tmp_path / "a.parquet", ["", ""])
    assert "holds no text" in error_of(config("parquet", tmp_path / "a.parquet"))


@pytest.mark.parametrize("source, package", [("parquet", "pyarrow"), ("hf_dataset", "pyarrow")])
def test_without_pyarrow_one_line_says_how_to_install_it(formats, monkeypatch, source, package):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'moejax[data]'" in error_of(DataConfig(**formats[source]))


def test_readers_refuse_what_is_not_theirs(tmp_path):
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(ConfigError, match="a.parquet"):
        ParquetReader({str(tmp_path / "a.parquet"): "a"}, "text")
    with pytest.raises(ConfigError, match="state.json"):
        HfReader({str(tmp_path): "x"}, "text")
    with pytest.raises(ConfigError, match="a.parquet"):
        RecordReader({str(tmp_path / "a.parquet"): "a"}, "text")


def test_document_ids_name_the_document_of_every_token(formats):
    cfg = DataConfig(**formats["parquet"], seq_len=64)
    corpus = load_corpus(cfg, "all")
    batches = list(make_eval_batches(cfg, ByteTokenizer(), corpus, 4, document_ids=True))
    ids = np.concatenate([batch["document_ids"].ravel() for batch in batches])
    tokens = np.concatenate([batch["tokens"].ravel() for batch in batches])
    for document in (0, 17, 59):
        text = bytes(tokens[ids == document][:-1].astype(np.uint8)).decode()
        assert text == TEXTS[document]
    padding = np.concatenate([batch["segment_ids"].ravel() for batch in batches]) == 0
    assert (ids[padding] == -1).all() and (ids[~padding] >= 0).all()
