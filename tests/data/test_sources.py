"""Sources: what is a document, which split it is in, and what bad input says."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import ConfigError, DataConfig
from moejax.data.corpus import Corpus, in_split, split_hash
from moejax.data.sources import load_corpus
from moejax.data.text_files import is_excluded

FIXTURE = Path(__file__).parents[1] / "fixtures" / "text"


def files_config(*paths, **changes):
    return DataConfig(source="files", paths=tuple(str(p) for p in paths), **changes)


@pytest.fixture(scope="module")
def stdlib():
    return load_corpus(DataConfig(), "train"), load_corpus(DataConfig(), "validation")


def test_stdlib_splits_are_large_enough_and_share_no_file(stdlib):
    train, validation = stdlib
    assert validation.num_bytes >= 200_000
    assert train.num_bytes >= 8_000_000
    assert not set(train.names) & set(validation.names)
    assert len(set(train.names)) == len(train)


def test_stdlib_leaves_out_tests_and_installed_packages(stdlib):
    folders = {part for corpus in stdlib for name in corpus.names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages"}
    assert "unittest" in folders


def test_stdlib_is_the_same_when_loaded_again(stdlib):
    again = load_corpus(DataConfig(), "validation")
    assert again == stdlib[1]


def test_sha256_is_that_of_sorted_names_and_texts():
    corpus = Corpus.from_documents("x", [("b", "zwei é"), ("a", "one"), ("empty", "")])
    assert corpus.names == ("a", "b")
    assert corpus.num_bytes == 3 + 7
    assert corpus.sha256 == hashlib.sha256("1 3 aone1 7 bzwei é".encode()).hexdigest()
    assert Corpus.from_documents("x", [("a", "one"), ("b", "zwei e")]).sha256 != corpus.sha256


@pytest.mark.parametrize(
    "name, excluded",
    [
        ("test/a.py", True),
        ("ctypes/test/a.py", True),
        ("lib2to3/tests/a.py", True),
        ("site-packages/x/a.py", True),
        ("unittest/case.py", False),
        ("test.py", False),
        ("idlelib/idle_test/a.py", False),
    ],
)
def test_exclude_names_whole_folders(name, excluded):
    assert is_excluded(name, DataConfig().exclude) is excluded


@given(st.sets(st.text(min_size=1), min_size=2, max_size=40), st.floats(0.1, 99.9))
def test_splits_divide_the_names_and_neither_is_empty(names, percent):
    train, validation = (in_split(names, str, split, percent) for split in ("train", "validation"))
    assert train and validation
    assert sorted(train + validation) == sorted(names)


def test_a_name_keeps_its_split_when_others_join():
    names = [f"doc-{i}" for i in range(2000)]
    few = set(in_split(names[:500], str, "validation", 5.0))
    assert few == set(in_split(names, str, "validation", 5.0)) & set(names[:500])
    # Places are uniform: 100 of 2000 expected, five standard deviations are 49.
    assert 51 < sum(split_hash(name) < 5 for name in names) < 149


def test_files_gives_one_document_a_file_named_below_the_glob():
    corpora = [
        load_corpus(files_config(FIXTURE / "*.txt", FIXTURE / "*.md"), s)
        for s in ("train", "validation")
    ]
    texts = {
        name: text
        for corpus in corpora
        for name, text in zip(corpus.names, corpus.texts, strict=True)
    }
    assert sorted(texts) == sorted(p.name for p in FIXTURE.iterdir() if p.suffix in (".txt", ".md"))
    assert all(text == (FIXTURE / name).read_text(encoding="utf-8") for name, text in texts.items())


def test_a_corpus_does_not_depend_on_where_it_lies(tmp_path):
    for folder in ("one", "two/deeper"):
        for name in ("a.txt", "sub/b.md", "c.py"):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}")
    one, two = (
        load_corpus(files_config(tmp_path / f / "**" / "*.*"), "train")
        for f in ("one", "two/deeper")
    )
    assert len(one) == 2 and one.names == two.names and one.sha256 == two.sha256


def test_a_file_named_twice_is_read_once(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    cfg = files_config(tmp_path / "*.txt", tmp_path / "a.txt")
    assert len(load_corpus(cfg, "train")) + len(load_corpus(cfg, "validation")) == 3


def test_jsonl_gives_one_document_a_line(tmp_path):
    path = tmp_path / "docs.jsonl"
    # U+2028 ends a line for str.splitlines, not for JSON.
    bodies = [f"document {i}\u2028still {i}" for i in range(30)]
    path.write_text(
        "\n".join(json.dumps({"body": b}, ensure_ascii=False) for b in bodies) + "\n\n",
        encoding="utf-8",
    )
    cfg = files_config(path, text_field="body", validation_percent=30.0)
    train, validation = load_corpus(cfg, "train"), load_corpus(cfg, "validation")
    by_name = dict(zip(train.names + validation.names, train.texts + validation.texts, strict=True))
    assert by_name == {f"docs.jsonl:{i}": body for i, body in enumerate(bodies, start=1)}
    assert len(validation) > 1


def test_synthetic_text_is_fixed_and_its_sums_are_right():
    cfg = DataConfig(source="synthetic", synthetic_docs=200)
    train, validation = load_corpus(cfg, "train"), load_corpus(cfg, "validation")
    assert len(train) + len(validation) == 200 and not set(train.texts) & set(validation.texts)
    sums = [
        line[:-1].split() for text in train.texts for line in text.splitlines() if " plus " in line
    ]
    assert len(sums) > 500
    assert all(int(a) + int(b) == int(c) for a, _, b, _, c in sums)
    larger = load_corpus(cfg.replace(synthetic_docs=300), "train")
    assert set(train.texts) <= set(larger.texts)


def test_synthetic_documents_are_recorded():
    """The generated corpus is the same on every machine and version."""
    corpus = load_corpus(DataConfig(source="synthetic", synthetic_docs=50), "train")
    assert corpus.sha256 == "850bdf667da9fcc61e734403022f6d23d2be029fb6188033f175ac8e226b967f"


def error_of(cfg, split="train"):
    with pytest.raises(ConfigError) as caught:
        load_corpus(cfg, split)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_file_and_glob_without_match_are_named(tmp_path):
    assert "nowhere.txt" in error_of(files_config(tmp_path / "nowhere.txt"))
    assert "*.md" in error_of(files_config(tmp_path / "*.md"))
    assert "data.paths" in error_of(files_config())


def test_empty_data_is_named(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt" in error_of(files_config(tmp_path / "empty.txt"))


def test_one_document_leaves_nothing_to_validate(tmp_path):
    (tmp_path / "a.txt").write_text("alone")
    cfg = files_config(tmp_path / "a.txt", validation_percent=0.001)
    assert load_corpus(cfg, "train").texts == ("alone",)
    assert "validation" in error_of(cfg, "validation")


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"text": "cut', "not JSON"),
        ('{"txt": "x"}', "txt"),
        ('["text"]', "list"),
        ('{"text": 3}', "'text'"),
    ],
)
def test_bad_jsonl_line_is_named_with_its_number(tmp_path, line, says):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    message = error_of(files_config(path))
    assert "bad.jsonl, line 2" in message and says in message


def test_undecodable_and_unknown_files_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "table.csv").write_text("a,b")
    assert "latin.txt" in error_of(files_config(tmp_path / "latin.txt"))
    assert ".csv" in error_of(files_config(tmp_path / "table.csv"))


def test_half_a_character_is_named_with_its_line(tmp_path):
    """JSON can escape one half of a surrogate pair; no UTF-8 text holds it."""
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "a \\ud800 b"}\n')
    message = error_of(files_config(path))
    assert "half.jsonl:2: the text is not valid Unicode" in message


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8-sig")
    assert load_corpus(files_config(path), "all").texts == ("one", "two")
