"""Batches: exact resume, the same rows for any number of processes, evaluation over every token."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import ConfigError, DataConfig
from moejax.data.evaluation import make_eval_batches
from moejax.data.packing import tokenize_corpus
from moejax.data.pipeline import make_train_iterator
from moejax.data.rows import ShuffledRows
from moejax.data.sources import Corpus, load_corpus
from moejax.data.tokenize import ByteTokenizer

BYTES = ByteTokenizer()
# 57 documents, some 300 rows: an epoch is 38 batches.
CFG = DataConfig(source="synthetic", synthetic_docs=60, seq_len=96, batch_size=8, prefetch=3)
CORPUS = load_corpus(CFG, "train")


def train_iterator(cfg=CFG, corpus=CORPUS, seed=3, **kwargs):
    return make_train_iterator(cfg, BYTES, corpus, seed=seed, **kwargs)


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def assert_equal_batches(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@pytest.fixture(scope="module")
def first_90():
    """Batches of more than two epochs."""
    return take(train_iterator(), 90)


def test_batches_have_the_shape_and_dtype_promised(first_90):
    for batch in first_90:
        assert set(batch) == {"tokens", "segment_ids", "labels"}
        assert all(a.shape == (8, 96) and a.dtype == np.int32 for a in batch.values())
        assert (batch["segment_ids"] > 0).all()


def test_an_epoch_holds_its_stream_once_but_for_a_last_short_row():
    documents = tokenize_corpus(BYTES, CORPUS)
    rows = ShuffledRows(documents, CFG.seq_len, seed=3)
    whole = np.bincount(documents.tokens, minlength=257)
    for epoch in (0, 1):
        start = epoch * rows.rows_per_epoch
        seen = np.concatenate([rows[start + n]["tokens"] for n in range(rows.rows_per_epoch)])
        missing = whole - np.bincount(seen, minlength=257)
        assert (missing >= 0).all() and missing.sum() == len(documents.tokens) % CFG.seq_len


def test_epochs_and_seeds_differ_in_order(first_90):
    rows = ShuffledRows(tokenize_corpus(BYTES, CORPUS), CFG.seq_len, seed=3)
    assert not np.array_equal(rows[0]["tokens"], rows[rows.rows_per_epoch]["tokens"])
    assert not np.array_equal(next(train_iterator(seed=4))["tokens"], first_90[0]["tokens"])


@settings(max_examples=15, deadline=None)
@given(step=st.integers(0, 80), prefetch=st.integers(1, 9))
def test_resume_repeats_the_run_from_any_step(first_90, step, prefetch):
    cfg = CFG.replace(prefetch=prefetch)
    iterator = train_iterator(cfg)
    take(iterator, step)
    state = json.loads(json.dumps(iterator.get_state()))
    assert_equal_batches(take(train_iterator(cfg, start_state=state), 5), first_90[step : step + 5])


def test_state_is_what_was_consumed_and_can_be_set_back(first_90):
    iterator = train_iterator()
    early = iterator.get_state()
    for _ in range(7):
        next(iterator)
    assert iterator.get_state()["rows"] == 56
    assert iterator.epoch == 56 / iterator.get_state()["rows_per_epoch"]
    iterator.set_state(early)
    assert_equal_batches(take(iterator, 3), first_90[:3])


def test_worker_processes_give_the_same_batches_and_resume(first_90):
    cfg = CFG.replace(num_workers=2)
    iterator = train_iterator(cfg)
    got = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    iterator.set_state(state)
    got += take(iterator, 3)
    assert_equal_batches(got, first_90[:8])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_union_of_processes_is_the_global_batch(first_90, count):
    parts = [take(train_iterator(shard=(i, count)), 3) for i in range(count)]
    joined = [
        {k: np.concatenate([p[step][k] for p in parts]) for k in parts[0][step]}
        for step in range(3)
    ]
    assert_equal_batches(joined, first_90[:3])


def test_a_state_of_one_process_resumes_four(first_90):
    iterator = train_iterator()
    take(iterator, 40)
    parts = [
        take(train_iterator(shard=(i, 4), start_state=iterator.get_state()), 1)[0] for i in range(4)
    ]
    assert_equal_batches(
        [{k: np.concatenate([p[k] for p in parts]) for k in parts[0]}], first_90[40:41]
    )


def test_another_batch_size_goes_on_at_the_very_next_row(first_90):
    iterator = train_iterator()
    take(iterator, 5)
    got = take(train_iterator(CFG.replace(batch_size=12), start_state=iterator.get_state()), 4)
    for key in first_90[0]:
        want = np.concatenate([batch[key] for batch in first_90[5:11]])
        np.testing.assert_array_equal(np.concatenate([batch[key] for batch in got]), want)


@pytest.mark.parametrize("seq_len", [32, 200])
def test_another_seq_len_goes_on_at_the_same_share_of_the_epoch(seq_len):
    iterator = train_iterator()
    take(iterator, 50)
    resumed = train_iterator(CFG.replace(seq_len=seq_len), start_state=iterator.get_state())
    one_row = 1 / resumed.get_state()["rows_per_epoch"]
    assert iterator.epoch - one_row <= resumed.epoch <= iterator.epoch
    assert take(resumed, 2)[0]["tokens"].shape == (8, seq_len)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": 1, "rows": None, "rows_per_epoch": 3},
        {"format": 9, "rows": 1, "rows_per_epoch": 3},
    ],
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ConfigError, match="data position"):
        train_iterator(start_state=state)


def test_too_little_text_and_odd_processes_are_refused():
    with pytest.raises(ConfigError, match="seq_len"):
        train_iterator(corpus=Corpus.from_documents("x", [("a", "short")]))
    with pytest.raises(ConfigError, match="batch_size=8 .* 3 processes"):
        train_iterator(shard=(0, 3))


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_evaluation_counts_every_token_once(batch_size):
    corpus = load_corpus(CFG.replace(validation_percent=30.0), "validation")
    batches = make_eval_batches(CFG, BYTES, corpus, batch_size)
    listed = list(batches)
    assert len(listed) == len(batches)
    assert all(a.shape == (batch_size, 96) for batch in listed for a in batch.values())
    stream = b"".join(text.encode() + b"\0" for text in corpus.texts)
    seen = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in listed])
    np.testing.assert_array_equal(
        np.where(seen == BYTES.eos_id, 0, seen), np.frombuffer(stream, np.uint8)
    )
    assert batches.num_tokens == len(stream) and batches.num_bytes == len(stream) - len(corpus)
    assert batches.num_labels == sum((b["labels"] >= 0).sum() for b in listed)
    assert_equal_batches(list(batches), listed)


def test_evaluation_is_the_same_over_processes_and_nats_per_byte_rescales():
    corpus = load_corpus(CFG.replace(validation_percent=30.0), "validation")
    whole = make_eval_batches(CFG, BYTES, corpus, 8)
    parts = [list(make_eval_batches(CFG, BYTES, corpus, 8, shard=(i, 4))) for i in range(4)]
    joined = [
        {k: np.concatenate([p[s][k] for p in parts]) for k in parts[0][s]}
        for s in range(len(whole))
    ]
    assert_equal_batches(joined, list(whole))
    assert whole.nats_per_byte(2.0) == pytest.approx(2.0 * whole.num_tokens / whole.num_bytes)
