"""`tiktoken.model`: ids equal a plain byte-pair encoder's and the published construction's, damaged
files are named by their line, special tokens are read only when asked for."""

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import ConfigError, DataConfig
from moejax.data import HfTokenizer, TiktokenTokenizer, Tokenizer, get_tokenizer, load_tokenizer
from moejax.data.tiktoken_bpe import PATTERN, cuts

FOLDER = Path(__file__).parents[1] / "fixtures" / "tokenizer"
FIRST = 1451  # ranks of the fixture
SAMPLE = (
    "Hello World! I'm sure they'VE said it'd be CamelCaseHTTPServer, isn't it?",
    "北京市 Pascal 中文English混合,漢字とカタカナabc東京タワー",
    "안녕하세요 세계! مرحبا بالعالم، Привет, МИР — Γειά σου",
    "नमस्ते दुनिया, L'année où j'ai été; Füße, Übermut ǅ ǆ ʰ e\u0301a\u0300",
    "👩‍👩‍👧‍👦👍🏽 🇩🇪🇯🇵 ❤️‍🔥 x²+½→∞ 😀",
    "1234567890 3.14159 ٣٤٥ 〇一二 Ⅷ 1,000,000",
    "  \t\n\n   leading\r\n\r\n  \n trailing   \u00a0\u3000 \u2028x  ",
    "def f(x):\n\t\treturn x**2  # sq\r\n\r\n    if (a && b) { c[i] += 1; }\n\n\n",
    "[EOS] <|end_of_msg|><|reserved_token_1500|> <think>x</think>",
    "\x00\x07\x7f\u200b\ufeff\ufffd",
    "",
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60)
MIXED = st.lists(
    st.one_of(
        TEXTS, st.sampled_from([*SAMPLE, "漢", "A", "a", "'s", " ", "\n", "\r\n", "12", "!"])
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def kimi():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def ranks():
    lines = (FOLDER / "tiktoken.model").read_text().split("\n")[:-1]
    return {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}


def reference_pieces(text):
    """The published splitting rule by another engine, with the classes as set differences."""
    head = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
    tail = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
    # `regex` counts U+001C to U+001F as blanks in \s, which Unicode's property does not.
    blank = r"\p{White_Space}"
    before, after = r"[^\r\n\p{L}\p{N}]?", "(?:'(?:[sStTmMdD\u017f]|[rR][eE]|[vV][eE]|[lL][lL]))?"
    rule = (
        rf"(?V1)\p{{Han}}+|{before}{head}*{tail}+{after}|{before}{head}+{tail}*{after}"
        rf"|\p{{N}}{{1,3}}| ?[^{blank}\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|{blank}*[\r\n]+|{blank}+(?!\P{{White_Space}})|{blank}+"
    )
    return regex.findall(rule, text)


def reference_ids(text, ranks):
    """Byte-pair encoding as it is defined: join the leftmost pair of the lowest rank, again."""
    ids = []
    for piece in reference_pieces(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while pairs := [
            (ranks[joined], at)
            for at in range(len(parts) - 1)
            if (joined := parts[at] + parts[at + 1]) in ranks
        ]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", SAMPLE)
def test_ids_of_a_mixed_script_sample(kimi, ranks, text):
    ids = kimi.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == reference_ids(text, ranks)
    assert kimi.decode(ids) == text
    assert "".join(reference_pieces(text)) == text


def test_ids_of_random_text(kimi, ranks):
    @settings(max_examples=300, deadline=None)
    @given(MIXED)
    def check(text):
        ids = kimi.encode(text)
        assert ids.tolist() == reference_ids(text, ranks)
        assert kimi.decode(ids) == text
        assert not len(ids) or ids.max() < FIRST

    check()


def test_the_rule_is_the_published_one(kimi):
    """Letter by letter the rule of the released files; a few splits that it is known for."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    no_han, short = r"&&[^\p{Han}]]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    published = (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{upper}{no_han}*[{lower}{no_han}+{short}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{upper}{no_han}+[{lower}{no_han}*{short}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert published == PATTERN
    assert reference_pieces("中文English混合") == ["中文", "English", "混合"]
    assert reference_pieces("北京市 Pascal12345") == ["北京市", " Pascal", "123", "45"]
    encoding = tiktoken.Encoding(
        "published",
        pat_str=published,
        mergeable_ranks=tiktoken.load.load_tiktoken_bpe(str(FOLDER / "tiktoken.model")),
        special_tokens=kimi.special_ids,
    )
    for text in SAMPLE:
        assert kimi.encode(text).tolist() == encoding.encode_ordinary(text)
        assert kimi.encode(text, specials=True).tolist() == encoding.encode(
            text, allowed_special="all"
        )


def test_special_tokens_are_read_only_when_asked_for(kimi):
    text = "a[EOS]b<|reserved_token_1500|><think>"
    plain, asked = kimi.encode(text), kimi.encode(text, specials=True)
    assert plain.max() < FIRST and kimi.decode(plain) == text
    assert asked[asked >= FIRST].tolist() == [FIRST + 1, 1500, FIRST + 30]
    # Special tokens are left out of the text; one that the files call not special is part of it.
    assert kimi.decode(asked) == "ab<think>"


def test_ids_of_the_special_tokens(kimi):
    assert isinstance(kimi, Tokenizer) and isinstance(kimi, TiktokenTokenizer)
    assert kimi.vocab_size == FIRST + 256
    assert (kimi.bos_id, kimi.eos_id, kimi.pad_id) == (FIRST, FIRST + 1, FIRST + 255)
    # A document ends with [EOS]; generation also at the turn's end and where the model says.
    assert kimi.stop_ids == (FIRST + 1, FIRST + 2, FIRST + 9)
    assert sorted(kimi.special_ids.values()) == list(range(FIRST, FIRST + 256))
    assert kimi.special_ids["<|reserved_token_1600|>"] == 1600


def test_layout_of_the_published_sizes(tmp_path):
    """163584 ranks and 256 special tokens with the published ids; loads in seconds."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [f"{rank:06d}".encode() for rank in range(256, 163584)]
    (tmp_path / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    )
    names = {163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163839: "[PAD]"}
    config = {
        "added_tokens_decoder": {str(token): {"content": name} for token, name in names.items()},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 163586}')
    kimi = load_tokenizer(tmp_path / "tiktoken.model")
    assert (kimi.vocab_size, kimi.bos_id, kimi.eos_id, kimi.pad_id) == (
        163840,
        163584,
        163585,
        163839,
    )
    assert kimi.stop_ids == (163585, 163586)
    assert kimi.special_ids["<|reserved_token_163587|>"] == 163587


def test_batch_equals_one_by_one(kimi):
    for one, text in zip(kimi.encode_batch(SAMPLE), SAMPLE, strict=True):
        np.testing.assert_array_equal(one, kimi.encode(text))


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("ab " * 10_000, [30_000]),
        ("x" * 25_000, [25_000]),
        ("x" * 25_001, [25_000, 1]),
        (" " * 10 + "x" * 60_000 + "  y", [25_010, 25_000, 10_003]),
        ("ab " * 150_000, [400_000, 50_000]),
        ("", []),
    ],
)
def test_long_texts_are_cut_as_published(text, lengths):
    pieces = list(cuts(text))
    assert [len(piece) for piece in pieces] == lengths and "".join(pieces) == text


def test_a_long_run_of_blanks_encodes(kimi):
    text = " " * 60_000 + "\n" * 60_000
    assert kimi.decode(kimi.encode(text)) == text


def changed(tmp_path, old, new, count=1):
    """A copy of the fixture's folder with one line of `tiktoken.model` changed."""
    folder = shutil.copytree(FOLDER, tmp_path / "copy")
    data = (folder / "tiktoken.model").read_bytes()
    assert old in data
    (folder / "tiktoken.model").write_bytes(data.replace(old, new, count))
    return folder


def error_of(path):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"Ag== 2\n", b"Ag== 2 3\n", "line 3: must be a token in base64"),
        (b"Ag== 2\n", b"Ag==2\n", "line 3: must be a token in base64"),
        (b"Ag== 2\n", b"Ag== -2\n", "line 3: must be a token in base64"),
        (b"Ag== 2\n", b"Ag== " + b"9" * 5000 + b"\n", "line 3: must be a token in base64"),
        (b"Ag== 2\n", b"A@== 2\n", "line 3: not base64"),
        (b"Ag== 2\n", b"Ag= 2\n", "line 3: not base64"),
        (b"Ag== 2\n", b" 2\n", "line 3: the token is empty"),
        (b"Ag== 2\n", b"Ag== 1\n", "line 3: rank 1 repeats line 2"),
        (b"Ag== 2\n", b"AQ== 2\n", "line 3: token b'\\x01' repeats line 2"),
        (b"Ag== 2\n", b"", "line 1450: rank 1450 is given, but rank 2 is on no line"),
        (b"Ag== 2\n", b"AgIC 2\n", "byte 0x02 is on none of 1451 lines"),
    ],
)
def test_damaged_ranks_are_named_by_their_line(tmp_path, old, new, message):
    folder = changed(tmp_path, old, new)
    error = error_of(folder)
    assert message in error and str(folder / "tiktoken.model") in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bos_token": "[nope]"}, "'[nope]' is not among the 256 special tokens"),
        ({"bos_token": 7}, "bos_token must be a string"),
        ({"pad_token": {"text": "x"}}, "pad_token has no content string"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder['x']"),
        ({"added_tokens_decoder": {"1451": {"content": ""}}}, "gives id 1451 the name ''"),
        (
            {"added_tokens_decoder": {"1451": {"content": "a"}, "1452": {"content": "a"}}},
            "gives id 1452 the name 'a', which is that of id 1451",
        ),
        ({"added_tokens_decoder": {"163585": {"content": "[EOS]"}}}, "do the files belong"),
        (
            {"added_tokens_decoder": {}, "eos_token": None, "bos_token": None, "pad_token": None},
            "no end-of-document token",
        ),
    ],
)
def test_damaged_configurations_are_named(tmp_path, change, message):
    folder = shutil.copytree(FOLDER, tmp_path / "copy")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
    assert message in error_of(folder)


def test_other_files_are_named(tmp_path):
    assert "neither a tokenizer.json nor a tiktoken.model" in error_of(tmp_path)
    folder = shutil.copytree(FOLDER, tmp_path / "copy")
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json: not JSON" in error_of(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    assert "must be a JSON object, not list" in error_of(folder)
    (folder / "tokenizer_config.json").unlink()
    assert "needs tokenizer_config.json beside it" in error_of(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "eos_token_id 'x' is not a token id" in error_of(folder)


def test_a_stop_token_above_the_vocabulary_is_refused(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5000]}')
    assert "eos_token_id 5000 is not below the 1707 tokens" in error_of(folder)


def test_data_settings_take_the_folder_and_the_file(kimi):
    for path in (FOLDER, FOLDER / "tiktoken.model"):
        assert get_tokenizer(DataConfig(tokenizer=str(path)), None).sha256 == kimi.sha256


def test_the_hash_follows_ids_and_names(tmp_path, kimi):
    folder = shutil.copytree(FOLDER, tmp_path / "copy")
    assert load_tokenizer(folder).sha256 == kimi.sha256
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config.replace("<|open|>", "<|opened|>"))
    assert load_tokenizer(folder).sha256 != kimi.sha256


def test_a_folder_with_tokenizer_json_uses_its_configuration(tmp_path):
    tokens = {"a": 0, "b": 1, "<eot>": 2, "<bos>": 3, "<turn>": 4}
    added = [
        {"id": token, "content": name, "special": True, "lstrip": False, "rstrip": False,
         "normalized": False, "single_word": False}
        for name, token in tokens.items() if token > 1
    ]  # fmt: skip
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": added, "model": model})
    )
    assert "no end-of-document token" in error_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eot>", "bos_token": "<bos>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HfTokenizer) and isinstance(tokenizer, Tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (3, 2, None)
    assert tokenizer.stop_ids == (2, 4)
    assert tokenizer.encode("a<eot>b", specials=True).tolist() == [0, 2, 1]
    assert 2 not in tokenizer.encode("a<eot>b")
