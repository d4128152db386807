"""Tokenizers: decoding undoes encoding, training repeats itself, the cache is used, bad files are
named."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import ConfigError, DataConfig
from moejax.data.sources import load_corpus
from moejax.data.tokenize import (
    END_OF_TEXT,
    ByteTokenizer,
    HfTokenizer,
    Tokenizer,
    _learned_parts,
    get_tokenizer,
    train_bpe,
)

SYNTHETIC = DataConfig(source="synthetic", synthetic_docs=200, bpe_vocab_size=320)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    texts = load_corpus(SYNTHETIC, "train").texts
    return train_bpe(texts, 320, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(params=["byte", "bpe"], scope="module")
def tokenizer(request, bpe):
    return bpe if request.param == "bpe" else ByteTokenizer()


def test_decoding_undoes_encoding(tokenizer):
    @settings(max_examples=200, deadline=None)
    @given(TEXTS)
    def check(text):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert not len(ids) or 0 <= ids.min() and ids.max() < tokenizer.vocab_size

    check()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n    \t\r\n",
        "né 漢字 🙂\u200d ё",
        "a\x00b",
        f"x{END_OF_TEXT}y",
        "x" * 5000,
        "1234567",
    ],
)
def test_awkward_texts_survive(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert isinstance(tokenizer, Tokenizer)


def test_batch_equals_one_by_one(tokenizer):
    texts = ["", "the red fox sees a hare.\n", "12 plus 30 is 42.\n"]
    for one, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, tokenizer.encode(text))


def test_bpe_has_the_size_asked_for_and_shortens_text(bpe):
    text = "".join(load_corpus(SYNTHETIC, "validation").texts)
    assert bpe.vocab_size == 320
    assert len(bpe.encode(text)) < len(text) / 2


def test_same_texts_train_the_same_file(bpe, tmp_path):
    again = train_bpe(
        load_corpus(SYNTHETIC, "train").texts, 320, tmp_path / "new" / "tokenizer.json"
    )
    assert again.sha256 == bpe.sha256
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["tokenizer.json"]


def test_a_text_of_one_line_is_learned_from_in_parts(tmp_path):
    """Time grows with length, not its square; words stay whole; short lines are as they were."""
    words = load_corpus(SYNTHETIC, "train").texts
    line = " ".join(3 * "".join(words).split())[:200_000]
    assert len(line) == 200_000 and "\n" not in line
    parts = list(_learned_parts("a\n\n" + line + "\n" * 5000))
    assert "".join(parts) == "a\n\n" + line + "\n" * 5000 and max(map(len, parts)) <= 2002
    assert set(" ".join(parts[1:-3]).split()) == set(line.split())
    assert [len(part) for part in _learned_parts("x" * 4500)] == [2000, 2000, 500]
    assert list(_learned_parts(words[0])) == [words[0]]
    started = time.process_time()
    tokenizer = train_bpe([line, line[::-1]], 320, tmp_path / "tokenizer.json")
    assert time.process_time() - started < 10, "whole, the two lines take half a minute"
    assert tokenizer.decode(tokenizer.encode(line)) == line


def test_bpe_is_trained_once_and_kept_in_the_workdir(tmp_path):
    first = get_tokenizer(SYNTHETIC, tmp_path)
    before = (tmp_path / "tokenizer.json").stat()
    # Another corpus would give another tokenizer: the run keeps the one it has.
    second = get_tokenizer(SYNTHETIC.replace(synthetic_docs=20), tmp_path)
    after = (tmp_path / "tokenizer.json").stat()
    assert second.sha256 == first.sha256 and (before.st_ino, before.st_mtime_ns) == (
        after.st_ino,
        after.st_mtime_ns,
    )
    assert get_tokenizer(SYNTHETIC, None).sha256 == first.sha256


def test_bpe_sees_the_training_split_only(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "moejax.data.tokenize.train_bpe", lambda texts, *_: seen.extend(texts) or ByteTokenizer()
    )
    get_tokenizer(SYNTHETIC, tmp_path)
    assert tuple(seen) == load_corpus(SYNTHETIC, "train").texts


def error_of(tokenizer, workdir):
    with pytest.raises(ConfigError) as caught:
        get_tokenizer(SYNTHETIC.replace(tokenizer=str(tokenizer)), workdir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_tokenizer_files_are_named(tmp_path, bpe):
    assert "nowhere.json" in error_of(tmp_path / "nowhere.json", None)
    (tmp_path / "bad.json").write_text("{}")
    assert "bad.json" in error_of(tmp_path / "bad.json", None)
    no_end = json.loads(open(bpe.name).read())
    no_end["added_tokens"] = []
    del no_end["model"]["vocab"][END_OF_TEXT]
    (tmp_path / "endless.json").write_text(json.dumps(no_end))
    assert END_OF_TEXT in error_of(tmp_path / "endless.json", None)


def test_a_kept_tokenizer_larger_than_the_setting_is_an_error(tmp_path):
    get_tokenizer(SYNTHETIC, tmp_path)
    with pytest.raises(ConfigError, match="bpe_vocab_size=300"):
        get_tokenizer(SYNTHETIC.replace(bpe_vocab_size=300), tmp_path)


def test_too_small_a_vocabulary_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="256"):
        train_bpe(["text"], 256, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_file_is_read_by_path(bpe):
    read = get_tokenizer(DataConfig(tokenizer=bpe.name), None)
    assert isinstance(read, HfTokenizer)
    assert (read.sha256, read.vocab_size, read.eos_id) == (bpe.sha256, bpe.vocab_size, bpe.eos_id)
