"""Records of conversations: both forms read, and every bad line named with its reason."""

import json

import pytest

from moejax.config import ConfigError, DataConfig
from moejax.data.conversations import parse_record
from moejax.data.sources import load_corpus

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
LINE = json.dumps({"messages": [USER, ANSWER]})


def parsed(**record):
    return parse_record(json.dumps(record), "chats.jsonl:7")


def test_the_forms_of_a_record():
    assert parsed(prompt="p", completion="c", id=3) == {"prompt": "p", "completion": "c"}
    chat = parsed(messages=[USER, ANSWER])
    assert chat == {"messages": [USER, ANSWER], "first": 0, "tools": None, "kwargs": {}}
    both = parsed(prompt=[USER, ANSWER, USER], completion=[ANSWER], tools=[{"name": "t"}])
    assert both["first"] == 3 and both["messages"] == [USER, ANSWER] * 2
    assert both["tools"] == [{"name": "t"}]


def test_contents_are_texts_and_nulls_are_absent():
    parts = [{"type": "text", "text": "x "}, {"type": "text", "text": "y"}]
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "z", "reasoning": "why"},
    ]
    made = parsed(messages=messages)["messages"]
    assert made[0] == {"role": "user", "content": "x y"}
    assert made[1] == {"role": "assistant", "tool_calls": [call]}
    assert made[2]["reasoning_content"] == made[2]["thinking"] == "why"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "must be a JSON object, not list"),
        ({"text": "x"}, "must hold `messages`, or .*it has only text"),
        ({}, "it has only nothing"),
        ({"prompt": "x"}, "it has only prompt"),
        ({"messages": [USER, ANSWER], "prompt": "x", "completion": "y"}, "it has both forms"),
        ({"prompt": "x", "completion": ""}, "completion must be a text that is not empty"),
        ({"prompt": "x", "completion": [ANSWER]}, "as prompt is a text"),
        ({"prompt": [USER], "completion": "x"}, "completion must be a list of messages"),
        ({"messages": []}, "messages must be a list of messages that is not empty"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object, not str"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]\.role must be a text"),
        ({"messages": [USER, ANSWER, {"role": "robot", "content": "x"}]},
         r"messages\[2\]\.role='robot' is not known; roles are system, .* assistant, tool\."),
        ({"messages": [USER, ANSWER | {"content": " \n"}]}, r"messages\[1\]\.content is empty"),
        ({"prompt": 3, "completion": "x"}, "prompt must be a text or a list of messages, not int"),
        ({"prompt": None, "completion": "x"}, "prompt must be a text or a list .* not null"),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\]\.content .* not null"),
        ({"messages": [{"role": "user", "content": 3}]}, "list of text parts, not int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"a part of the type 'image_url' has no file: write",
        ),
        ({"messages": [USER]}, "no message of the role 'assistant'"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "no message of the role 'assistant'"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, r"messages\[1\]\.weight is not read"),
        ({"messages": [USER, ANSWER | {"tool_calls": [{}]}]}, "function with a name"),
        ({"messages": [USER, ANSWER | {"reasoning": 3}]}, "reasoning_content must be a text"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "tools must be a list of objects"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": 3}, "kwargs must be an object"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_by_file_and_line(record, reason):
    with pytest.raises(ConfigError, match=rf"^chats\.jsonl:7: .*{reason}"):
        parse_record(json.dumps(record), "chats.jsonl:7")


def test_files_are_read_by_line_and_held_out_by_document(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("\ufeff" + "\n".join([LINE, "", LINE.replace('"b"', '"b\u2028"'), LINE]))
    cfg = DataConfig(source="chat", paths=(str(file),), validation_percent=40.0)
    whole = load_corpus(cfg, "all")
    assert list(whole.names) == ["chats.jsonl:1", "chats.jsonl:3", "chats.jsonl:4"]
    split = [set(load_corpus(cfg, which).names) for which in ("train", "validation")]
    assert split[0] | split[1] == set(whole.names) and not split[0] & split[1]
    held_out = cfg.replace(validation_paths=(str(file),))
    assert len(load_corpus(held_out, "validation")) == len(load_corpus(held_out, "train")) == 3


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_text(LINE + "\n{oops\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "chat.txt").write_text(LINE)
    (tmp_path / "chat.tar").write_bytes(b"")
    (tmp_path / "half.jsonl").write_text(LINE.replace('"b"', '"\\ud800"') + "\n" + LINE)
    (tmp_path / "bytes.jsonl").write_bytes(LINE.encode() + b"\n\n\xff" + LINE.encode())
    for name, reason in (
        ("bytes.jsonl", r"bytes\.jsonl:3: not UTF-8 text \(byte 0xff\)"),
        ("bad.jsonl", r"bad\.jsonl:2: not JSON"),
        ("empty.jsonl", "hold no records"),
        ("chat.txt", "reads .jsonl files"),
        ("chat.tar", r"reads .jsonl files.* Shards are data.source='webdataset'; both .*mixture"),
        ("half.jsonl", r"half\.jsonl:1: the text is not valid Unicode"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_corpus(DataConfig(source="chat", paths=(str(tmp_path / name),)), "all")
