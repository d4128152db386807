"""Mixtures: shares of the tokens, epochs, and what changes when the config does."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import ConfigError, DataConfig, RunConfig
from moejax.config.load import apply_overrides, as_run_config
from moejax.data.evaluation import make_eval_batches, make_eval_sets
from moejax.data.packing import Documents, tokenize_corpus
from moejax.data.pipeline import make_train_iterator
from moejax.data.rows import PERIOD, MixedRows, Schedule, ShuffledRows
from moejax.data.sources import load_corpus
from moejax.data.tokenize import ByteTokenizer, training_sample

BYTES = ByteTokenizer()


def numbered(documents: int, length: int, first: int = 0) -> Documents:
    """Documents whose tokens all are the document's number."""
    texts = [np.full(length - 1, first + i, np.int32) for i in range(documents)]
    return Documents.from_token_lists(texts, eos_id=10_000)


def counted(rows) -> np.ndarray:
    """How often each token stands in rows, padding left out."""
    kept = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in rows])
    return np.bincount(kept, minlength=10_001)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_every_stretch_of_a_schedule_holds_the_shares(weights):
    schedule = Schedule(weights)
    shares = np.asarray(weights) / np.sum(weights)
    assert schedule.counts.sum() == PERIOD and (schedule.counts >= 1).all()
    for n in (1, 37, 1000, PERIOD - 1, PERIOD, 3 * PERIOD + 511):
        given = np.asarray(schedule.rows_before(n))
        assert given.sum() == n
        assert (abs(given - n * shares) <= len(weights) + n * len(weights) / PERIOD).all()


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(0, 3 * PERIOD))
@settings(max_examples=20, deadline=None)
def test_a_schedule_counts_its_members_in_order(weights, n):
    schedule = Schedule(weights)
    member, before = schedule(n)
    assert schedule.rows_before(n)[member] == before
    assert schedule.rows_until(member, before + 1) == n + 1


def test_a_tiny_share_is_not_lost():
    assert Schedule([1e-9, 1.0, 1e-9]).counts.tolist() == [1, PERIOD - 2, 1]


def test_weights_are_shares_of_the_tokens_whatever_the_length_of_documents():
    members = {
        "short": ShuffledRows(numbered(500, 3), 16, (0, 1)),
        "long": ShuffledRows(numbered(5, 300, first=500), 16, (0, 2)),
    }
    rows = MixedRows(members, {"short": 3, "long": 1})
    tokens = np.concatenate([rows[n]["tokens"] for n in range(400)])
    assert (tokens[tokens < 10_000] >= 500).sum() == pytest.approx(0.25 * tokens.size, rel=0.02)


@pytest.mark.parametrize("length, count", [(7, 31), (40, 9), (16, 8)])
def test_every_document_stands_once_in_an_epoch(length, count):
    """Whole documents, so whole epochs: padding fills the last row."""
    rows = ShuffledRows(numbered(count, length), 16, 5, epochs=3)
    per_epoch = rows.rows_per_epoch
    assert per_epoch == -(-count * length // 16) and rows.num_rows == 3 * per_epoch
    orders = []
    for epoch in range(3):
        epoch_rows = [rows[epoch * per_epoch + n] for n in range(per_epoch)]
        seen = counted(epoch_rows)
        assert (seen[:count] == length - 1).all() and seen[10_000] == count
        orders.append(np.concatenate([row["tokens"] for row in epoch_rows]).tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert (rows[rows.num_rows]["segment_ids"] == 0).all()


def test_a_run_of_epochs_ends_with_the_last_row_filled_up():
    cfg = DataConfig(source="synthetic", synthetic_docs=20, seq_len=64, batch_size=7, epochs=2)
    corpus = load_corpus(cfg, "train")
    iterator = make_train_iterator(cfg, BYTES, corpus, seed=0)
    left = iterator.batches_left
    assert iterator.last_step(5, 1000) == 5 + left and iterator.last_step(5, 6) == 6
    batches = list(iterator)
    assert len(batches) == left and iterator.batches_left == 0
    assert list(iterator) == []
    kept = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in batches])
    whole = np.bincount(tokenize_corpus(BYTES, corpus).tokens, minlength=257)
    np.testing.assert_array_equal(np.bincount(kept, minlength=257), 2 * whole)
    resumed = make_train_iterator(
        cfg, BYTES, corpus, seed=0, start_state=json.loads(json.dumps(iterator.get_state()))
    )
    assert resumed.batches_left == 0 and list(resumed) == []


def test_a_mixture_ends_when_the_first_member_is_through():
    members = {
        "a": ShuffledRows(numbered(40, 16), 16, (0, 1), epochs=2),
        "b": ShuffledRows(numbered(1000, 16, first=40), 16, (0, 2), epochs=2),
    }
    rows = MixedRows(members, {"a": 1, "b": 1})
    seen = counted([rows[n] for n in range(rows.num_rows)])
    assert (seen[:40] == 2 * 15).all()
    assert rows.num_rows in (159, 160)
    assert (rows[rows.num_rows]["segment_ids"] == 0).all()


MIXTURE = (
    {"name": "words", "source": "synthetic", "synthetic_docs": 80, "weight": 0.7},
    {"name": "more", "source": "synthetic", "synthetic_docs": 30, "weight": 0.3},
)


def config(**changes) -> DataConfig:
    values = {"mixture": MIXTURE, "seq_len": 64, "batch_size": 8, "tokenizer": "byte"} | changes
    return as_run_config({"data": values}).data


def iterator_of(cfg, **kwargs):
    return make_train_iterator(cfg, BYTES, load_corpus(cfg, "train"), seed=1, **kwargs)


def members_of(iterator) -> dict[str, ShuffledRows]:
    return dict(zip(iterator._rows.weights, iterator._rows._rows, strict=True))


def test_shuffle_seed_stands_in_for_the_seed():
    first = [next(iterator_of(config(shuffle_seed=s)))["tokens"].tolist() for s in (-1, 1, 2)]
    assert first[0] == first[1] != first[2]


def test_a_member_keeps_its_order_when_another_joins():
    alone, both = iterator_of(config(mixture=MIXTURE[:1])), iterator_of(config())
    rows = [row.tolist() for _ in range(3) for row in next(alone)["tokens"]]
    mixed = [row.tolist() for _ in range(2) for row in next(both)["tokens"]]
    assert [row for row in mixed if row in rows] == rows[:11]  # 0.7 of 16 rows


def test_other_weights_go_on_where_each_member_stood():
    """Behind the change every member gives its very next rows, and a new member begins."""
    iterator = iterator_of(config())
    for _ in range(5):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    stood = state["mixture"]["member_rows"]
    assert sum(stood.values()) == 40 and stood["words"] == 28
    third = {"name": "new", "source": "synthetic", "synthetic_docs": 10}
    changed = iterator_of(config(mixture=({**MIXTURE[0], "weight": 1.0}, third)), start_state=state)
    got = [row.tolist() for row in next(changed)["tokens"]]
    words = members_of(iterator)["words"]
    following = [words[n]["tokens"].tolist() for n in range(28, 32)]
    assert [row for row in got if row in following] == following
    again = changed.get_state()["mixture"]["member_rows"]
    assert again == {"words": 32, "new": 4}


def test_a_mixture_follows_a_single_source_and_the_other_way_round():
    single = make_train_iterator(
        plain := DataConfig(source="synthetic", synthetic_docs=80, seq_len=64, batch_size=8),
        BYTES,
        load_corpus(plain, "train"),
        seed=1,
    )
    next(single)
    mixed = iterator_of(config(), start_state=single.get_state())
    assert mixed.get_state()["rows"] == 0
    next(mixed)
    single.set_state(mixed.get_state())
    assert single.get_state()["rows"] == 0
    with pytest.raises(ConfigError, match="none of a mixture"):
        mixed.set_state({"format": 1, "rows": 3, "rows_per_epoch": 9, "mixture": {}})


def test_members_in_another_order_go_on_where_they_stood():
    """Ties are broken by the order, so it is another schedule, and no row comes twice."""
    iterator = iterator_of(config())
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    turned = iterator_of(config(mixture=MIXTURE[::-1]), start_state=state)
    assert turned.get_state()["mixture"]["member_rows"] == {"words": 6, "more": 2}
    assert turned.get_state()["rows"] == 0


def test_the_corpus_of_a_mixture_is_that_of_its_members():
    cfg = config()
    corpus = load_corpus(cfg, "train")
    assert len(corpus) == sum(map(len, corpus.parts)) == len(corpus.texts) == len(corpus.names)
    assert corpus.texts[len(corpus) - 1] == corpus.parts[1].texts[-1]
    assert "words" not in corpus.name and corpus.num_bytes == sum(p.num_bytes for p in corpus.parts)
    assert set(training_sample(cfg)) == set(corpus.texts)
    validation = load_corpus(cfg, "validation")
    batches = make_eval_batches(cfg, BYTES, validation, 8)
    assert batches.num_tokens == validation.num_bytes + len(validation)


def test_a_mixture_is_written_in_a_file_or_as_json(tmp_path):
    as_tuple = RunConfig(data=config()).data.mixture
    text = json.dumps(MIXTURE)
    (tmp_path / "mix.json").write_text(text)
    named = {entry["name"]: {k: v for k, v in entry.items() if k != "name"} for entry in MIXTURE}
    assert DataConfig(mixture=MIXTURE).mixture == as_tuple
    for value in (text, str(MIXTURE), str(tmp_path / "mix.json"), json.dumps(named)):
        assert apply_overrides(RunConfig(), {"data.mixture": value}).data.mixture == as_tuple


@pytest.mark.parametrize(
    "mixture, says",
    [
        ("[{'name': 'a', 'weigth': 1}]", r"data.mixture\[0\].weigth.*weight"),
        ("[{'name': 'a'}, {'name': 'b', 'weight': 0.0}]", r"data.mixture\[1\].weight=0.0"),
        ("[{'name': 'a'}, {'name': 'a'}]", "2 entries called 'a'"),
        ("[{'name': 'a/b'}]", "'a/b' is not allowed"),
        ("[3]", r"data.mixture\[0\]=3 is not a mapping"),
        ("{'a': 3}", "data.mixture"),
        ("[{'source': 'parket'}]", r"data.mixture\[0\].source='parket'.*'parquet'"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_a_wrong_mixture_is_one_line(mixture, says):
    with pytest.raises(ConfigError, match=says) as caught:
        apply_overrides(RunConfig(), {"data.mixture": mixture})
    assert "\n" not in str(caught.value)


def test_evaluation_sets_have_names_and_splits(formats):
    sets = {
        "whole": {"source": "parquet", "paths": formats["parquet"]["paths"]},
        "part": {"source": "synthetic", "split": "validation", "synthetic_docs": 100},
    }
    cfg = apply_overrides(RunConfig(data=config()), {"eval.sets": json.dumps(sets)})
    batches = make_eval_sets(cfg, BYTES)
    assert list(batches) == ["whole", "part"]
    whole = load_corpus(cfg.eval.sets[0], "all")
    assert batches["whole"].num_bytes == whole.num_bytes
    assert batches["part"].num_bytes < batches["whole"].num_bytes
    assert all(batch["tokens"].shape == (8, 64) for batch in batches["part"])
    bad = apply_overrides(cfg, {"eval.sets": "{'x': {'paths': ('none.txt',)}}"})
    with pytest.raises(ConfigError, match="evaluation set x: .*none.txt"):
        make_eval_sets(bad, BYTES)
