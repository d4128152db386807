"""Lines of chat and instruction data: what they may hold, checked before anything is trained.

A line is one JSON object:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}                      plain texts
    {"prompt": [{"role": ...}], "completion": [{"role": ...}]}   messages before and to learn

`content` is a text or a list of {"type": "text", "text": ...} and {"type": "image", "path": FILE},
the file relative to that of the line; parts without one take those of the record's list `images` in
turn, which of a plain prompt stand in front of it, and so those of a message that has `images` (or
one `image`). Beside them may stand `tools` (JSON schemas) and `chat_template_kwargs` (what the chat
template is asked for). Other keys are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moejax.config import ConfigError, SourceFields
from moejax.data.corpus import Split, in_split
from moejax.data.image_marks import ImageRef, refuse_marks, with_marks
from moejax.data.paths import matches

Message = dict[str, Any]
# Names that a message's reasoning goes by; templates read the first, and some the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_documents(cfg: SourceFields, split: Split) -> list[tuple[str, str]]:
    """The (name, checked record as JSON) pairs of one split of .jsonl files.

    Raises:
      ConfigError: a line is no record; its file and number are named, and the reason.
    """
    held_out = split == "validation" and cfg.validation_paths
    field, paths = ("validation_paths", cfg.validation_paths) if held_out else ("paths", cfg.paths)
    documents = [
        document
        for path, name in matches(paths, field=f"data.{field}").items()
        for document in _read(path, name)
    ]
    if not documents:
        raise ConfigError(f"data.{field}={paths!r} hold no records: every file is empty.")
    if cfg.validation_paths:
        return documents
    return in_split(documents, lambda document: document[0], split, cfg.validation_percent)


def _read(path: str, name: str) -> Iterator[tuple[str, str]]:
    if os.path.splitext(path)[1] not in (".jsonl", ".json"):
        hint = ""
        if path.endswith(".tar"):
            hint = (
                " Shards are data.source='webdataset'; both in one run are two members of "
                "data.mixture."
            )
        raise ConfigError(
            f"{path}: data.source='chat' reads .jsonl files, one record a line.{hint}"
        )
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = 1 + error.object[: error.start].count(b"\n")
        raise ConfigError(
            f"{path}:{number}: not UTF-8 text (byte {error.object[error.start]:#04x}). Save the "
            "file as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error
    # Not splitlines: U+2028 may stand in a JSON text as it is.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record = parse_record(line, f"{path}:{number}", os.path.dirname(path))
            yield f"{name}:{number}", json.dumps(record, ensure_ascii=False)


def parse_record(
    line: str, where: str, folder: str = "", images: Sequence[ImageRef] = ()
) -> dict[str, Any]:
    """The record of a line in one form, whichever it was written in.

    Args:
      line: JSON text.
      where: file and line, for messages.
      folder: that the paths of images are relative to.
      images: those that lie with the record.
    Returns:
      `prompt` and `completion` (texts), or `messages` and `first` (the message from which on
      assistants' are learned), with `tools` and `kwargs`; contents are texts, in which
      marks stand for images.
    Raises:
      ConfigError: `where` and the reason.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}).") from error
    if any(c in line for c in "\ue0f2\ue0f3\ue0f4") or "ue0f" in line.lower():
        refuse_marks(record, where)
    record = with_marks(record, folder, where, images)
    try:
        return _checked(record)
    except _Refused as error:
        raise ConfigError(f"{where}: {error}.") from error


class _Refused(ValueError):
    """Why a record cannot be used."""


def _checked(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise _Refused(f"must be a JSON object, not {type(record).__name__}")
    has_messages = "messages" in record
    if has_messages == ("prompt" in record and "completion" in record):
        both = "both forms" if has_messages else f"only {', '.join(sorted(record)) or 'nothing'}"
        raise _Refused(f"must hold `messages`, or `prompt` and `completion`; it has {both}")
    if not has_messages and isinstance(record["prompt"], str):
        return _plain(record)
    if not has_messages and not isinstance(record["prompt"], list):
        kind = _kind(record["prompt"])
        raise _Refused(f"prompt must be a text or a list of messages, not {kind}")
    if has_messages:
        messages, first = _messages(record["messages"], "messages"), 0
    else:
        before = _messages(record["prompt"], "prompt", allow_none=True)
        messages, first = before + _messages(record["completion"], "completion"), len(before)
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise _Refused("no message of the role 'assistant' is in it: nothing to learn")
    return {"messages": messages, "first": first, **_options(record)}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(record["completion"], str) or not record["completion"]:
        raise _Refused("completion must be a text that is not empty, as prompt is a text")
    return {"prompt": record["prompt"], "completion": record["completion"]}


def _options(record: dict[str, Any]) -> dict[str, Any]:
    tools, kwargs = record.get("tools"), record.get("chat_template_kwargs")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise _Refused("tools must be a list of objects")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise _Refused("chat_template_kwargs must be an object")
    return {"tools": tools or None, "kwargs": kwargs or {}}


def _messages(value: Any, field: str, allow_none: bool = False) -> list[Message]:
    if not isinstance(value, list) or not (value or allow_none):
        raise _Refused(f"{field} must be a list of messages that is not empty")
    return [_message(message, f"{field}[{place}]") for place, message in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    """No null fields, the content as one text, reasoning under the name that templates use."""
    if not isinstance(value, dict):
        raise _Refused(f"{where} must be an object, not {type(value).__name__}")
    message = {key: field for key, field in value.items() if field is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise _Refused(f"{where}.role must be a text such as 'user'")
    if message["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise _Refused(f"{where}.role={message['role']!r} is not known; roles are {known}")
    if "weight" in message and message["weight"] != 1:
        raise _Refused(f"{where}.weight is not read; data.train_on='last' learns the last answer")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(calls, f"{where}.tool_calls")
    if "content" in message or not calls:
        message["content"] = _content(message.get("content"), f"{where}.content")
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise _Refused(f"{where}.{REASONING[0]} must be a text")
    said = f"{message.get('content', '')}{reasoning or ''}"
    if message["role"] == "assistant" and not calls and not said.strip():
        raise _Refused(f"{where}.content is empty: an answer is a text, or has tool_calls")
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _content(value: Any, where: str) -> str:
    """A text, or the texts of a list of parts joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _Refused(f"{where} must be a text or a list of text parts, not {_kind(value)}")
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _Refused(
                f"{where}[{place}] is {kind!r}; parts that are read are of the type 'text', with "
                "its \"text\", or 'image' and 'image_url', with a file"
            )
    return "".join(part["text"] for part in value)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise _Refused(f"{where} must be a list")
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Refused(f"{where}[{place}] must have a function with a name")
