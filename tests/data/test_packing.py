"""Packing: every token once and in order, borders kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.packing import IGNORED, Documents, PackedRows, padding_row

EOS = 7


@st.composite
def packings(draw):
    """Documents of distinct tokens (so that each can be told apart), an order, a row length."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    ids = iter(range(1000, 5000))
    documents = [np.array([next(ids) for _ in range(n)], np.int32) for n in lengths]
    order = draw(st.permutations(range(len(lengths))))
    return documents, np.array(order), draw(st.integers(2, 40))


def pack(documents, order, seq_len):
    packed = PackedRows(Documents.from_token_lists(documents, EOS), order, seq_len)
    return packed, [packed.row(i) for i in range(packed.num_rows)]


@given(packings())
def test_every_token_stands_once_in_stream_order(packing):
    documents, order, seq_len = packing
    packed, rows = pack(*packing)
    stream = np.concatenate([np.append(documents[i], EOS) for i in order])
    kept = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in rows])
    np.testing.assert_array_equal(kept, stream)
    assert packed.num_tokens == len(stream)
    assert packed.num_full == len(stream) // seq_len


@given(packings())
def test_segment_ids_rise_by_one_and_padding_stands_in_front_of_the_last_row(packing):
    _, rows = pack(*packing)
    for i, row in enumerate(rows):
        ids = row["segment_ids"]
        assert set(np.diff(ids)) <= {0, 1}
        assert ids[-1] >= 1 and ids[0] <= 1
        assert i == len(rows) - 1 or ids[0] == 1
        assert all(array.dtype == np.int32 and len(array) == packing[2] for array in row.values())


@given(packings())
def test_a_segment_is_one_piece_of_one_document(packing):
    documents, _, _ = packing
    whole = {tuple(np.append(d, EOS)) for d in documents}
    for row in pack(*packing)[1]:
        for segment in range(1, row["segment_ids"].max() + 1):
            piece = tuple(row["tokens"][row["segment_ids"] == segment].tolist())
            assert any(piece == d[i : i + len(piece)] for d in whole for i in range(len(d)))
            assert EOS not in piece[:-1]


@given(packings())
def test_labels_are_the_next_token_of_the_segment_and_only_its_last_has_none(packing):
    for row in pack(*packing)[1]:
        tokens, ids, labels = row["tokens"], row["segment_ids"], row["labels"]
        for t in range(len(tokens)):
            inside = t + 1 < len(tokens) and ids[t] == ids[t + 1] and ids[t] > 0
            assert labels[t] == (tokens[t + 1] if inside else IGNORED)


def test_a_known_packing():
    documents = [np.array([1, 2, 3], np.int32), np.array([], np.int32), np.array([4, 5], np.int32)]
    _, rows = pack(documents, np.arange(3), 5)
    np.testing.assert_array_equal(rows[0]["tokens"], [1, 2, 3, EOS, EOS])
    np.testing.assert_array_equal(rows[0]["segment_ids"], [1, 1, 1, 1, 2])
    np.testing.assert_array_equal(rows[0]["labels"], [2, 3, EOS, -100, -100])
    np.testing.assert_array_equal(rows[1]["tokens"], [EOS, EOS, 4, 5, EOS])
    np.testing.assert_array_equal(rows[1]["segment_ids"], [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(rows[1]["labels"], [-100, -100, 5, EOS, -100])


def test_rows_outside_are_refused_and_padding_rows_have_no_label():
    packed, _ = pack([np.arange(4, dtype=np.int32)], np.arange(1), 5)
    with pytest.raises(IndexError):
        packed.row(1)
    row = padding_row(5, EOS)
    assert not row["segment_ids"].any() and (row["labels"] == IGNORED).all()
