"""Streaming decode: what is given, joined, is the whole decode; never half a character."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from moejax.data import ByteTokenizer, HfTokenizer, StreamDecoder, load_tokenizer, train_bpe

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tokenizer"
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
AWKWARD = ["👩‍👩‍👧‍👦", "🇯🇵", "é漢字", " ", "  ▁", "e\u0301", "\ufffd", "a b", "❤️‍🔥x", "\n\t"]
MIXED = st.lists(st.one_of(TEXTS, st.sampled_from(AWKWARD)), max_size=6).map("".join)


def with_bytes(tmp_path):
    """A file as those made from sentencepiece: blanks as ▁, characters not known as bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "ab", "▁▁", "é", "漢", ".", "\ufffd"]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁")]
    hf = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return saved(hf, tmp_path)


def with_metaspace(tmp_path):
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((char, -3.0) for char in "abcdé漢.")]
    pieces += [("▁a", -1.0), ("▁ab", -1.0), ("</s>", -9.0)]
    hf = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    hf.pre_tokenizer = pre_tokenizers.Metaspace()
    hf.decoder = decoders.Metaspace()
    return saved(hf, tmp_path)


def with_word_pieces(tmp_path):
    vocab = dict(zip(["[UNK]", "a", "##b", "b", "##a", ".", "'", "</s>"], range(8), strict=True))
    hf = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.decoder = decoders.WordPiece(cleanup=True)
    return saved(hf, tmp_path)


def with_word_ends(tmp_path):
    vocab = dict(zip(["<unk>", "a", "b", "a</w>", "b</w>", "</s>"], range(6), strict=True))
    hf = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.decoder = decoders.BPEDecoder()
    return saved(hf, tmp_path)


def saved(hf, tmp_path):
    hf.add_special_tokens(["</s>"])
    hf.add_tokens(["<mark é>"])
    hf.save(str(tmp_path / "tokenizer.json"))
    return HfTokenizer(tmp_path / "tokenizer.json")


def with_byte_level(tmp_path):
    train_bpe(["the red fox, Füße 漢字 🙂 👩‍👩‍👧‍👦 "] * 9, 300, tmp_path / "tokenizer.json")
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    return saved(hf, tmp_path)


MAKERS = {
    "byte": lambda tmp_path: ByteTokenizer(),
    "kimi": lambda tmp_path: load_tokenizer(FIXTURE),
    "byte level": with_byte_level,
    "byte pieces": with_bytes,
    "metaspace": with_metaspace,
    "word pieces": with_word_pieces,
    "word ends": with_word_ends,
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))


def streamed(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_pushed_text_is_the_decoded_text(tokenizer):
    """Of texts, with every prefix whole characters: no prefix has a U+FFFD that the text lacks."""

    @settings(max_examples=100, deadline=None)
    @given(MIXED)
    def check(text):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in part for part in parts)

    check()


def test_any_ids_stream_to_their_decode(tokenizer):
    """Of ids that no text has: broken characters, special tokens, ids above the vocabulary."""

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    def check(ids):
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(np.asarray(ids, np.int32))

    check()


@pytest.mark.parametrize("name", ["byte", "kimi", "byte level", "byte pieces"])
def test_a_character_comes_with_its_last_byte(name, tmp_path):
    tokenizer = MAKERS[name](tmp_path)
    text = "x🙂"
    ids = tokenizer.encode(text).tolist()
    decoder = StreamDecoder(tokenizer)
    before = "".join(decoder.push(token) for token in ids[:-1])
    last = decoder.push(ids[-1])
    assert "x" in before or name == "byte pieces"
    assert before in ("", "x")
    # Pieces for single bytes are settled by the piece behind them.
    assert last + decoder.flush() == text[len(before) :]
    assert last == ("" if name == "byte pieces" else "🙂")


def test_a_new_text_may_begin_after_flush(tokenizer):
    ids = tokenizer.encode("a b")
    decoder = StreamDecoder(tokenizer)
    for _ in range(2):
        assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)
    assert decoder.flush() == ""


def test_an_unfinished_character_is_marked_at_the_end():
    decoder = StreamDecoder(ByteTokenizer())
    assert [decoder.push(byte) for byte in "é".encode()[:1]] == [""]
    assert decoder.flush() == "\ufffd"


def test_a_tokenizer_with_decode_only_streams():
    class Words:
        def decode(self, ids):
            return " ".join("ab"[token] for token in ids)

    assert streamed(Words(), [0, 1, 0]) == ["a", " b", " a", ""]
