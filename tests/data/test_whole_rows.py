"""Packing of conversations: each whole and once, what is learned has its label, few rows; training
batches go on from any position, for any number of processes, in a mixture too."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import ConfigError, DataConfig, SourceConfig
from moejax.data.build_cache import prepare
from moejax.data.evaluation import make_eval_batches
from moejax.data.packing import Documents, tokenize_corpus
from moejax.data.pipeline import make_train_iterator
from moejax.data.rows import ShuffledRows
from moejax.data.sources import load_corpus
from moejax.data.tokenize import ByteTokenizer
from moejax.data.whole_rows import IGNORED, WholeRows, best_fit

EOS, BYTES = 7, ByteTokenizer()


def documents_of(masks, too_long="drop"):
    """Documents of distinct tokens, learned where the masks say so."""
    starts = np.cumsum([0, *map(len, masks)])
    tokens = np.arange(1000, 1000 + starts[-1], dtype=np.int32)
    trained = np.array([learned for mask in masks for learned in mask], bool)
    sizes = np.array([sum(mask) for mask in masks], np.int64)
    return Documents(tokens, starts, EOS, trained, sizes, too_long)


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=12)


@given(MASKS, st.integers(2, 40), st.sampled_from(["drop", "truncate"]), st.randoms())
def test_every_document_stands_whole_and_once_with_its_labels(masks, seq_len, too_long, random):
    documents = documents_of(masks, too_long)
    order = np.array(random.sample(range(len(masks)), len(masks)))
    packed = WholeRows(documents, order, seq_len)
    rows = [packed.row(n) for n in range(packed.num_rows)]
    seen, labels, tokens = [], 0, 0
    for n, row in enumerate(rows):
        owners = packed.document_ids(n)
        assert all(array.dtype == np.int32 and len(array) == seq_len for array in row.values())
        np.testing.assert_array_equal(owners < 0, row["segment_ids"] == 0)
        assert set(np.diff(row["segment_ids"])) <= {0, 1} and row["segment_ids"][-1] >= 1
        for segment in range(1, row["segment_ids"].max() + 1):
            here = row["segment_ids"] == segment
            (document,) = set(owners[here].tolist())
            stop = documents.starts[document + 1]
            own = slice(stop - here.sum(), stop)
            np.testing.assert_array_equal(row["tokens"][here], documents.tokens[own])
            following = np.append(documents.tokens[own][1:], IGNORED)
            learned = np.append(documents.trained[own][1:], False)
            np.testing.assert_array_equal(
                row["labels"][here], np.where(learned, following, IGNORED)
            )
            assert learned.any()
            seen.append(document)
            labels, tokens = labels + learned.sum(), tokens + here.sum()
    assert len(seen) == len(set(seen)) == len(masks) - packed.num_dropped
    assert (labels, tokens) == (packed.num_labels, packed.num_tokens)
    assert packed.num_bytes == sum(sum(masks[document]) for document in seen)
    for document in set(range(len(masks))) - set(seen):
        mask = masks[document]
        nothing_to_learn = not any(mask[1:])
        cut = len(mask) - seq_len
        assert nothing_to_learn or cut > 0 and (too_long == "drop" or mask.index(True) <= cut)


def test_a_prompt_loses_its_beginning_and_an_answer_nothing():
    answer = [False] * 6 + [True] * 3
    packed = WholeRows(documents_of([answer, [False] + [True] * 8], "truncate"), np.arange(2), 5)
    assert (packed.num_rows, packed.num_truncated, packed.num_dropped) == (1, 1, 1)
    np.testing.assert_array_equal(packed.row(0)["tokens"], [1004, 1005, 1006, 1007, 1008])
    np.testing.assert_array_equal(packed.row(0)["labels"], [IGNORED, 1006, 1007, 1008, IGNORED])
    with pytest.raises(IndexError):
        packed.row(1)


@given(st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_fills_boxes(lengths):
    boxes = best_fit(np.array(lengths, np.int64), 20)
    assert sorted(item for box in boxes for item in box) == list(range(len(lengths)))
    loads = [sum(lengths[item] for item in box) for box in boxes]
    assert all(0 < load <= 20 for load in loads)
    # No two boxes could have been one.
    assert all(a + b > 20 for n, a in enumerate(loads) for b in loads[:n])


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = ({"prompt": f"{n} times", "completion": str(n) * (1 + n % 17)} for n in range(300))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        source="chat", paths=(str(file),), tokenizer="byte", seq_len=64, batch_size=4, prefetch=2
    )


def iterator_of(cfg, **kwargs):
    return make_train_iterator(cfg, BYTES, load_corpus(cfg, "train"), seed=5, **kwargs)


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        for key in ("tokens", "segment_ids", "labels"):
            np.testing.assert_array_equal(a[key], b[key])


def test_training_goes_on_from_any_position(cfg):
    whole = iterator_of(cfg)
    per_epoch = -(-whole.get_state()["rows_per_epoch"] // cfg.batch_size)
    want = take(whole, per_epoch + 6)
    for step in (1, per_epoch - 1, per_epoch + 2):
        iterator = iterator_of(cfg)
        take(iterator, step)
        state = json.loads(json.dumps(iterator.get_state()))
        assert_same(take(iterator_of(cfg, start_state=state), 4), want[step : step + 4])


def test_workers_get_the_same_rows(cfg):
    """What is sent to them is the pickled rows."""
    rows = ShuffledRows(tokenize_corpus(BYTES, load_corpus(cfg, "train")), cfg.seq_len, 5)
    copy = pickle.loads(pickle.dumps(rows))
    assert_same([copy[n] for n in range(5)], [rows[n] for n in range(5)])


def test_what_is_left_out_is_told(cfg):
    with pytest.warns(UserWarning, match=r"of \d+ conversations \d+ are left out and 0 cut"):
        iterator_of(cfg.replace(seq_len=20))
    with pytest.warns(UserWarning, match=r"0 are left out and \d+ cut in front.*seq_len=53"):
        iterator_of(cfg.replace(seq_len=53, too_long="truncate"))


def test_epochs_hold_every_conversation_once_in_another_order(cfg):
    finite = iterator_of(cfg.replace(epochs=2, batch_size=1))
    rows = list(finite)
    half = len(rows) // 2
    first, second = rows[:half], rows[half:]
    key = [sorted(row["tokens"].tobytes() for row in part) for part in (first, second)]
    assert len(rows) % 2 == 0 and key[0] == key[1]
    assert [row["tokens"].tobytes() for row in first] != [r["tokens"].tobytes() for r in second]
    documents = tokenize_corpus(BYTES, load_corpus(cfg, "train"))
    assert sum(int(row["segment_ids"].max()) for row in first) == len(documents)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_give_the_parts_of_one_batch(cfg, count):
    want = take(iterator_of(cfg), 3)
    parts = [take(iterator_of(cfg, shard=(i, count)), 3) for i in range(count)]
    joined = [
        {key: np.concatenate([part[step][key] for part in parts]) for key in want[0]}
        for step in range(3)
    ]
    assert_same(joined, want)


def test_a_mixture_with_texts_has_rows_of_both(cfg):
    chat = {"name": "chat", "source": "chat", "paths": cfg.paths, "weight": 1.0}
    mixed = cfg.replace(mixture=(chat, {"name": "text", "source": "synthetic", "weight": 3.0}))
    batches = take(iterator_of(mixed), 4)
    labels = np.concatenate([batch["labels"] for batch in batches])
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    of_chat = (labels[:, :-1] == IGNORED).mean(-1) > 0.2
    assert of_chat.sum() == 4 and len(tokens) == 16
    corpus = load_corpus(mixed, "validation")
    held_out = make_eval_batches(mixed, BYTES, corpus, 4, document_ids=True)
    found = list(held_out)
    assert sum((batch["labels"] >= 0).sum() for batch in found) == held_out.num_labels
    ids = np.concatenate([batch["document_ids"].ravel() for batch in found])
    assert set(ids.tolist()) == set(range(-1, len(corpus)))


def test_evaluation_counts_learned_tokens_and_their_bytes(cfg):
    corpus = load_corpus(cfg.replace(validation_percent=30.0), "validation")
    batches = make_eval_batches(cfg, BYTES, corpus, 4, document_ids=True)
    listed = list(batches)
    assert batches.num_labels == sum((batch["labels"] >= 0).sum() for batch in listed)
    texts = [json.loads(text)["completion"] for text in corpus.texts]
    assert batches.num_bytes == sum(map(len, texts))
    assert batches.num_labels == batches.num_bytes + len(texts)  # each with its end
    assert batches.nats_per_byte(2.0) * batches.num_bytes == pytest.approx(2.0 * batches.num_labels)
    ids = np.concatenate([batch["document_ids"].ravel() for batch in listed])
    assert set(ids.tolist()) == set(range(-1, len(corpus)))


def test_what_fits_no_row_and_caches_are_refused(cfg, tmp_path):
    short = cfg.replace(seq_len=4)
    with pytest.raises(ConfigError, match="no conversation that fits data.seq_len=4"):
        iterator_of(short)
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "question", "completion": "answer"}\n')
    paths = {"paths": (str(one),), "validation_paths": (str(one),)}
    for change, why in (
        ({}, r"the shortest has 15 tokens\. Raise it, or set data\.too_long='truncate'\."),
        ({"too_long": "truncate"}, r"the shortest has 15 tokens, and no answer fits\. Raise it\."),
    ):
        with pytest.raises(ConfigError, match=f"the training split has no .*: {why}"):
            iterator_of(short.replace(**paths, **change))
    with pytest.raises(ConfigError, match="the held-out data has no conversation that fits"):
        make_eval_batches(short, BYTES, load_corpus(short, "validation"), 4)
    with pytest.raises(ConfigError, match="source='chat' has no cache"):
        prepare(cfg, tmp_path / "cache")
    with pytest.raises(ConfigError, match="train_on='answers' is not allowed"):
        SourceConfig(source="chat", train_on="answers")
