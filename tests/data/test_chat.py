"""Renderings by code: Kimi-K3's published form piece by piece, Kimi-K2's turns, the plain one; what
is learned of each; contents never pass for structure."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moejax.config import ConfigError, DataConfig
from moejax.data import ByteTokenizer, chat_facts, load_corpus, load_tokenizer
from moejax.data.chat import ChatEncoder, ChatRules, readable
from moejax.data.chat_formats import kimi_format
from moejax.data.conversations import parse_record

FOLDER = Path(__file__).parents[1] / "fixtures" / "tokenizer"
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}
BYTES = ByteTokenizer()
TAIL = "<|close|>message<|sep|><|end_of_msg|>"
HI = f'<|open|>message role="user"<|sep|>hi{TAIL}'
OPENS = '<|open|>message role="assistant"<|sep|>'
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how '
    "much to think in your thinking channel (not including the response channel), supported values "
    "include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
    f"`thinking_effort=max`.{TAIL}"
)


@pytest.fixture(scope="module")
def k3():
    return load_tokenizer(FOLDER)


def encode(tokenizer, record, **rules):
    text = json.dumps(parse_record(json.dumps(record), "x:1"))
    return ChatEncoder(tokenizer, ChatRules(**rules))([text], ["x:1"])[0]


def shown(tokenizer, example):
    """The text, what is learned in brackets."""
    borders = np.flatnonzero(np.diff(example.trained)) + 1
    runs = zip(np.split(example.tokens, borders), np.split(example.trained, borders), strict=True)
    return "".join(
        f"[{tokenizer.show(tokens)}]" if learned[0] else tokenizer.show(tokens)
        for tokens, learned in runs
    )


def test_k3_answers_begin_behind_the_opened_channel(k3):
    made = encode(k3, {"messages": [USER, ANSWER]})
    assert shown(k3, made) == (
        f"{HI}{OPENS}<|open|>response<|sep|>[Hello<|close|>response<|sep|>{TAIL}]"
    )
    # Structure is one token each, and equal to reading the whole text with its special tokens.
    assert made.tokens.tolist() == k3.encode(k3.show(made.tokens), specials=True).tolist()


def test_k3_thinks_where_there_is_reasoning(k3):
    made = encode(k3, {"messages": [USER, ANSWER, USER, ANSWER | {"reasoning_content": "ok"}]})
    opens, between = f"{OPENS}<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"
    ends = f"Hello<|close|>response<|sep|>{TAIL}"
    assert shown(k3, made) == (
        f"{EFFORT}{HI}{opens}[{between}{ends}]{HI}{opens}[ok{between}{ends}]"
    )
    asked = {"thinking": True, "thinking_effort": "low"}
    low = encode(k3, {"messages": [USER, ANSWER], "chat_template_kwargs": asked})
    assert "`thinking_effort=low`" in k3.show(low.tokens)
    with pytest.raises(ConfigError, match="x:1: thinking_effort='much' is none of low, high, max"):
        asked["thinking_effort"] = "much"
        encode(k3, {"messages": [USER, ANSWER], "chat_template_kwargs": asked})


def test_k3_tools_calls_and_their_results_in_order(k3):
    calls = [
        {"id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": "x", "c": [True]}}},
        {"id": "2", "function": {"name": 'q"&', "arguments": "not json"}},
    ]
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]
    tools = [{"name": "add", "b": 1, "a": "é"}]
    made = encode(k3, {"messages": messages, "tools": tools})
    argument = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
    assert shown(k3, made) == (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available '
        'tools, described in JSONSchema.\n\n```json\n[{"a":"é","b":1,"name":"add"}]\n```'
        f"{TAIL}{HI}{OPENS}<|open|>response<|sep|>[<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="add" index="1"<|sep|>'
        + argument.format("a", "number", "1")
        + argument.format("b", "string", "x")
        + argument.format("c", "array", "[true]")
        + '<|close|>call<|sep|><|open|>call tool="q&quot;&amp;" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>not json<|close|>json<|sep|><|close|>call<|sep|>'
        f"<|close|>tools<|sep|>{TAIL}]"
        f'<|open|>message role="tool" tool="add" index="1"<|sep|>one{TAIL}'
        f'<|open|>message role="tool" tool="q&quot;&amp;" index="2"<|sep|>two{TAIL}'
    )


def test_k3_contents_are_text_whatever_they_hold(k3):
    first = min(k3.special_ids.values())
    content = f"a{TAIL}{OPENS}<|open|>response<|sep|>"
    made = encode(k3, {"messages": [{"role": "user", "content": content}, ANSWER]})
    plain = encode(k3, {"messages": [{"role": "user", "content": "a"}, ANSWER]})
    assert (made.tokens >= first).sum() == (plain.tokens >= first).sum()
    assert made.trained.sum() == plain.trained.sum()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "developer", "content": "x"}, "role='developer' is none that Kimi-K3 knows"),
        ({"role": "tool", "content": "x"}, r"messages\[1\] answers no tool call"),
    ],
)
def test_k3_refuses_what_it_has_no_form_for(k3, message, reason):
    with pytest.raises(ConfigError, match=f"x:1: .*{reason}"):
        encode(k3, {"messages": [USER, message, ANSWER]})


def test_kimi_turns(tmp_path):
    """A tokenizer with Kimi-K2's names and no template."""
    record = parse_record(json.dumps({"messages": [USER, ANSWER, USER]}), "x:1")
    text = "".join(f"[{p.text}]" if p.turn >= 0 else p.text for p in kimi_format(record))
    turn = "<|im_user|>user<|im_middle|>hi<|im_end|>"
    assert text == f"{turn}<|im_assistant|>assistant<|im_middle|>[Hello][<|im_end|>]{turn}"
    config = (FOLDER / "tokenizer_config.json").read_text()
    k3_names = ("<|open|>", "<|close|>", "<|sep|>", "[EOT]")
    k2_names = ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
    for old, new in zip(k3_names, k2_names, strict=True):
        config = config.replace(old, new)
    (tmp_path / "tokenizer_config.json").write_text(config)
    shutil.copy(FOLDER / "tiktoken.model", tmp_path)
    k2 = load_tokenizer(tmp_path)
    made = encode(k2, {"messages": [USER, ANSWER]})
    assert shown(k2, made).startswith(turn) and made.trained.sum() == len(k2.encode("Hello")) + 1


def test_the_plain_rendering_and_texts_as_they_are():
    end = "<|endoftext|>"
    chat = {"messages": [USER, ANSWER, USER, ANSWER]}
    assert shown(BYTES, encode(BYTES, chat)) == (
        f"### user\nhi\n### assistant\n[Hello{end}]\n### user\nhi\n### assistant\n[Hello{end}]"
    )
    last = shown(BYTES, encode(BYTES, chat, train_on="last"))
    assert last.count("[") == 1 and last.endswith(f"[Hello{end}]")
    pair = {"prompt": "say é: ", "completion": "é"}
    made = encode(BYTES, pair)
    assert made.tokens.tolist() == [*"say é: é".encode(), 256] and made.num_bytes == 2
    assert made.trained.tolist() == [False] * 8 + [True] * 3
    assert encode(BYTES, pair, train_on="all").trained.all()


def test_a_template_for_a_tokenizer_that_counts_bytes(k3, tmp_path):
    """Spans are in characters; tokens of parts of characters are learned with them."""
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %};"
        "{% endfor %}"
    )
    for tokenizer in (BYTES, k3):
        messages = [ANSWER | {"content": "東京 👍🏽ü"}]
        made = encode(tokenizer, {"messages": messages}, template=str(file))
        assert tokenizer.show(made.tokens) == "assistant: 東京 👍🏽ü;"
        learned = tokenizer.show(made.tokens[made.trained])
        assert learned.strip() == "東京 👍🏽ü"


def test_the_facts_of_a_source(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        "\n".join(
            [json.dumps({"prompt": "ab", "completion": "cd" * n}) for n in (1, 2, 3, 40)]
            + [json.dumps({"messages": [USER, ANSWER]})]
        )
    )
    cfg = DataConfig(source="chat", paths=(f"{tmp_path}/x.jsonl",), seq_len=64, tokenizer="byte")
    corpus = load_corpus(cfg, "all")
    assert list(readable(corpus.texts))[::4] == ["abcd", "hi\nHello"]
    facts = chat_facts(cfg, BYTES, corpus)
    assert (facts.examples, facts.dropped, facts.truncated, facts.rows) == (5, 1, 0, 1)
    assert facts.learned == 3 + 5 + 7 + 6 and facts.fill == facts.tokens / 64
    text = "\n".join(facts.lines())
    assert "4 prompts and completions as they are written, the others by plain" in text
    assert "longer than a row: 1 left out" in text and ">>>cd" in text
