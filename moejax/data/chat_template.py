"""Chat templates of Hugging Face tokenizers: Jinja texts that render messages, in a sandbox.

A template is data of a checkpoint and not trusted: it runs in Jinja's immutable sandbox, sees plain
JSON values only, and can neither import nor read files.

Source: the names that a template sees, and the `generation` block, are those of
`transformers.PreTrainedTokenizerBase.apply_chat_template`; the tests compare ids and masks.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from moejax.config import ConfigError
from moejax.data.corpus import reason
from moejax.data.tokenizer_config import CONFIG_FILE, read_object

TEMPLATE_FILE = "chat_template.jinja"
# Private characters around what a generation block renders, taken out again: they move through
# filters and macros with the text, wherever a template puts it.
_OPEN, _CLOSE = "\ue0f0\ue0f1", "\ue0f1\ue0f0"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      text: the whole.
      spans: (start, stop) in characters of what each trained assistant turn wrote, ascending.
    """

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A compiled template and the special tokens' names that it may use.

    Args:
      source: the Jinja text.
      names: `bos_token` and the like -> name.
      origin: the file, for messages.
    Raises:
      ConfigError: the text is no Jinja template.
    """

    def __init__(self, source: str, names: dict[str, str], origin: str):
        self.source, self._names, self.origin = source, names, origin
        self.has_generation = _GENERATION.search(source) is not None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template {origin}: {reason(error)}.") from error

    def plain(self, record: dict[str, Any]) -> str:
        """The whole record as text."""
        return unmark(self.text(record))[0]

    def text(self, record: dict[str, Any], count: int | None = None, prompt: bool = False) -> str:
        """The first `count` messages (None: all) as text, spans marked; `prompt` opens an answer.

        Raises:
          ConfigError: the template refuses the messages, or fails on them.
        """
        values = self._names | record["kwargs"]
        try:
            return self._template.render(
                messages=record["messages"][:count], tools=record["tools"], documents=None,
                add_generation_prompt=prompt, **values,
            )  # fmt: skip
        except ConfigError:
            raise
        except Exception as error:  # a template can fail as any program can
            raise ConfigError(f"chat template {self.origin}: {reason(error)}.") from error

    def render(self, record: dict[str, Any], last_only: bool) -> Rendered:
        """The text of a record and the spans of the turns to learn.

        Spans are the template's own `generation` blocks, or else what each assistant message adds
        to the text of those before it with the prompt for an answer.

        Args:
          record: as `conversations.parse_record` gives it.
          last_only: only the last turn is asked for, and checked.
        Raises:
          ConfigError: without `generation` blocks, messages that come first are rendered otherwise
            when others follow.
        """
        marked = self.text(record)
        if not self.has_generation:
            return Rendered(marked, self._added(record, marked, last_only))
        text, spans = unmark(marked)
        turns = [message["role"] == "assistant" for message in record["messages"]]
        if len(spans) != sum(turns) and record["first"]:
            raise ConfigError(
                f"chat template {self.origin}: {len(spans)} generation blocks for {sum(turns)} "
                "assistant messages, so that those of the prompt cannot be told apart."
            )
        skipped = sum(turns[: record["first"]])
        return Rendered(text, spans[skipped:])

    def _added(self, record: dict[str, Any], whole: str, last_only: bool) -> list[tuple[int, int]]:
        """What each assistant message from `first` on adds, each prefix checked to be one."""
        messages = record["messages"]
        turns = [
            place
            for place in range(record["first"], len(messages))
            if messages[place]["role"] == "assistant"
        ]
        spans = []
        for place in turns[-1:] if last_only else turns:
            before = self.text(record, place, prompt=True)
            until = self.text(record, place + 1)
            if not (whole.startswith(until) and until.startswith(before)):
                raise ConfigError(
                    f"chat template {self.origin}: message {place} is rendered otherwise when it "
                    "stands at the end or is yet to be written, so what it adds is not known. Put "
                    "{% generation %} ... {% endgeneration %} around answers in the template, or "
                    "set data.train_on='last' or 'all'."
                )
            spans.append((len(before), len(until)))
        return spans


def unmark(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks of generation blocks, and where these stood."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for place, part in enumerate(marked.split(_OPEN)):
        inside, _, behind = part.partition(_CLOSE) if place else ("", "", part)
        if place:
            spans.append((at, at + len(inside)))
        pieces += [inside, behind]
        at += len(inside) + len(behind)
    return "".join(pieces), spans


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: what the assistant wrote."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )  # fmt: skip
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _today
    return env


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter writes `<` and `&` as for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _today(form: str) -> str:
    """A fixed day: rendered data must be the same whenever a run goes on."""
    return datetime.datetime(2026, 1, 1).strftime(form)


def read_template(folder: Path, file: str = "") -> ChatTemplate | None:
    """The template of a tokenizer's folder, or the one in `file`; None where there is none.

    Args:
      folder: where the tokenizer lies; `chat_template.jinja` comes before `tokenizer_config.json`.
      file: `data.chat_template`; empty for the tokenizer's own.
    Raises:
      ConfigError: no such file, or it holds no template.
    """
    config = read_object(folder / CONFIG_FILE)
    names = {
        key: content
        for key, value in config.items()
        if key.endswith("_token")
        and isinstance(content := value.get("content") if isinstance(value, dict) else value, str)
    }
    path = Path(file) if file else folder / TEMPLATE_FILE
    if file or path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), names, str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat template {path}: cannot be read ({reason(error)}).") from error
    found, path = config.get("chat_template"), folder / CONFIG_FILE
    if isinstance(found, list):
        by_name = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = by_name.get("default")
        if found is None:
            raise ConfigError(f"{path}: none of the chat templates is called 'default'.")
    if found is None:
        return None
    if not isinstance(found, str):
        raise ConfigError(f"{path}: chat_template must be a text.")
    return ChatTemplate(found, names, str(path))
