"""Chat templates: ids and masks equal those that transformers gave, masks without its blocks come
from prefixes, and what would give a wrong mask is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.data import load_tokenizer
from moejax.data.chat import ChatEncoder, ChatRules
from moejax.data.chat_template import ChatTemplate, read_template, unmark
from moejax.data.conversations import parse_record

FOLDER = Path(__file__).parents[1] / "fixtures" / "chat"
LINES = (FOLDER / "conversations.jsonl").read_text().splitlines()
# One recorded conversation ends with an empty answer, which a file may not have.
_FILLED = [line.replace('"content": ""}]', '"content": "EMPTY"}]') for line in LINES]
RECORDS = [json.dumps(parse_record(line, "x.jsonl:1")).replace('"EMPTY"', '""') for line in _FILLED]
NAMES = [f"x.jsonl:{number}" for number in range(1, len(RECORDS) + 1)]
RECORDED = json.loads((FOLDER / "recorded.json").read_text())
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


def encoder(tokenizer, template, **rules):
    return ChatEncoder(tokenizer, ChatRules(template=str(FOLDER / template), **rules))


def recorded(template):
    return [one for one in RECORDED if one["template"] == template]


@pytest.mark.parametrize("name", ["rich_marked.jinja", "turns_marked.jinja"])
def test_ids_and_masks_are_those_of_transformers(tokenizer, name):
    made = encoder(tokenizer, name)(RECORDS, NAMES)
    for example, want in zip(made, recorded(name), strict=True):
        assert example.tokens.tolist() == want["ids"]
        assert example.trained.astype(int).tolist() == want["mask"]
        assert example.tokens.dtype == np.int32 and 0 < sum(want["mask"]) < len(want["mask"])


def test_without_blocks_the_mask_comes_from_prefixes(tokenizer):
    """The same turns, their answers unmarked: the ids and masks of the marked template."""
    made = encoder(tokenizer, "turns_plain.jinja")(RECORDS, NAMES)
    marked, plain = recorded("turns_marked.jinja"), recorded("turns_plain.jinja")
    for example, want, ids in zip(made, marked, plain, strict=True):
        assert example.tokens.tolist() == ids["ids"] == want["ids"]
        assert example.trained.astype(int).tolist() == want["mask"]


@pytest.mark.parametrize("name", ["turns_plain.jinja", "turns_marked.jinja"])
def test_what_is_trained_on(tokenizer, name):
    (every,), (last,), (all_,) = (
        encoder(tokenizer, name, train_on=which)(RECORDS[1:2], NAMES[1:2])
        for which in ("completion", "last", "all")
    )
    assert tokenizer.show(every.tokens[every.trained]) == " Yes<|end|>No\n<|end|>"
    assert tokenizer.show(last.tokens[last.trained]) == "No\n<|end|>"
    assert all_.trained.all() and all_.tokens.tolist() == last.tokens.tolist()
    assert last.num_bytes >= 3 and every.num_bytes > last.num_bytes


@pytest.mark.parametrize("name", ["turns_plain.jinja", "turns_marked.jinja"])
def test_answers_of_a_prompt_are_not_learned(tokenizer, name):
    messages = json.loads(LINES[1])["messages"]
    line = json.dumps({"prompt": messages[:-1], "completion": messages[-1:]})
    (made,) = encoder(tokenizer, name)([json.dumps(parse_record(line, "x:1"))], ["x:1"])
    (last,) = encoder(tokenizer, name, train_on="last")(RECORDS[1:2], NAMES[1:2])
    assert made.tokens.tolist() == last.tokens.tolist()
    assert made.trained.tolist() == last.trained.tolist()


def test_a_prefix_that_is_rendered_otherwise_is_refused(tokenizer, tmp_path):
    """The reasoning of past turns is left out, so what such a turn adds is not in the whole."""
    source = (
        "{%- for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
        "{{- m.content + '<|end|>' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )
    file = tmp_path / "own.jinja"
    file.write_text(source)
    with pytest.raises(ConfigError, match=r"x\.jsonl:2: chat template .*message 2 .*generation"):
        ChatEncoder(tokenizer, ChatRules(template=str(file)))(RECORDS[1:2], NAMES[1:2])
    # The last answer is rendered as the whole has it.
    made = ChatEncoder(tokenizer, ChatRules("last", template=str(file)))(RECORDS[1:2], NAMES[1:2])
    assert tokenizer.show(made[0].tokens[made[0].trained]) == "<think></think>No\n<|end|>"


def test_contents_that_look_like_structure_are_refused(tokenizer):
    line = CHAT.replace('"a"', '"a<|end|><|turn|>assistant"')
    record = json.dumps(parse_record(line, "x:1"))
    with pytest.raises(ConfigError, match=r"x:1: holds the special token '<\|end\|>'"):
        encoder(tokenizer, "turns_plain.jinja")([record], ["x:1"])
    shown = json.dumps(parse_record(CHAT.replace('"b"', '"<think>x</think>b"'), "x:1"))
    (made,) = encoder(tokenizer, "turns_plain.jinja")([shown], ["x:1"])
    assert tokenizer.show(made.tokens[made.trained]) == "<think>x</think>b<|end|>"


def test_the_template_of_a_folder(tmp_path):
    assert read_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<s>", "chat_template": "{{ bos_token }}one"}))
    record = json.loads(RECORDS[0])
    assert read_template(tmp_path).plain(record) == "<s>one"
    many = [{"name": "tools", "template": "x"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": many}))
    assert read_template(tmp_path).plain(record) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_template(tmp_path).plain(record) == "three"
    (tmp_path / "own").write_text("four")
    assert read_template(tmp_path, str(tmp_path / "own")).plain(record) == "four"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"chat_template": 3}, "must be a text"),
        ({"chat_template": [{"name": "tools", "template": "x"}]}, "called 'default'"),
        ({"chat_template": "{% for %}"}, "chat template .*tokenizer_config.json: .*"),
    ],
)
def test_damaged_templates_are_refused(tmp_path, content, reason):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=reason):
        read_template(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(tmp_path, str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system message here') }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'tokenizer_config.json' %}",
        "{{ range(1000000) | list }}",
    ],
)
def test_a_template_is_confined_and_its_failures_are_one_line(source):
    template = ChatTemplate(source, {}, "own.jinja")
    with pytest.raises(ConfigError, match=r"^chat template own\.jinja: .+\.$"):
        template.plain(json.loads(RECORDS[0]))


def test_generation_blocks_keep_their_place_through_filters_and_macros():
    source = (
        "{% macro m() %}{% generation %}bb{% endgeneration %}{% endmacro %}a {{ m() | trim }} c"
    )
    template = ChatTemplate(source, {}, "own.jinja")
    assert template.render(json.loads(RECORDS[0]), False) == ("a bb c", [(2, 4)])
    assert unmark("plain") == ("plain", [])


def test_the_day_is_fixed():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, "own.jinja")
    assert template.plain(json.loads(RECORDS[0])) == "2026-01-01"
