"""Images inside the text of a record: each is a mark that names where its bytes lie.

Marks are private characters, which move through chat templates with the text around them. No text
of a record may hold them (`refuse_marks`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from moejax.config import ConfigError

_OPEN, _CLOSE, _FIELD = "\ue0f2", "\ue0f3", "\ue0f4"
_MARK = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_RESERVED = re.compile(f"[{_OPEN}{_CLOSE}{_FIELD}]")
# What a part with an image is called, and the file in it, in transformers and at OpenAI.
_KINDS = ("image", "image_url")
_FIELDS = ("image", "path", "url", "image_url")


class ImageRef(NamedTuple):
    """Where the bytes of an image lie.

    Attributes:
      file: an image file, or a file that holds it.
      name: of the member in such a file; empty where the file is the image.
      start, size: where it stands in there, in bytes.
    """

    file: str
    name: str = ""
    start: int = 0
    size: int = 0

    @property
    def label(self) -> str:
        """What a message calls it."""
        return f"{self.file}:{self.name}" if self.name else self.file

    def source(self) -> bytes | str:
        """A path, or the bytes: what an image reader opens. Raises OSError."""
        if not self.name:
            return self.file
        with open(self.file, "rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    @property
    def mark(self) -> str:
        """What stands for it in a text."""
        return _OPEN + _FIELD.join(map(str, self)) + _CLOSE


def split_marks(text: str) -> Iterator[str | ImageRef]:
    """The texts and images of a text in their order; empty texts are left out."""
    at = 0
    for found in _MARK.finditer(text):
        if found.start() > at:
            yield text[at : found.start()]
        file, name, start, size = found[1].split(_FIELD)
        yield ImageRef(file, name, int(start), int(size))
        at = found.end()
    if at < len(text):
        yield text[at:]


def has_marks(text: str) -> bool:
    """Whether an image stands in the text."""
    return _OPEN in text


def without_marks(text: str) -> str:
    """The text alone."""
    return _MARK.sub("", text)


def refuse_marks(value: Any, where: str) -> None:
    """Raises ConfigError where a text in a parsed record holds a character of marks."""
    texts = [value]
    while texts:
        value = texts.pop()
        if isinstance(value, str) and (found := _RESERVED.search(value)):
            raise ConfigError(
                f"{where}: holds the private character U+{ord(found[0]):04X}, which stands for "
                "images here. Take it out."
            )
        if isinstance(value, dict):
            texts += [*value, *value.values()]
        elif isinstance(value, list):
            texts += value


def with_marks(record: Any, folder: str, where: str, images: Sequence[ImageRef] = ()) -> Any:
    """A record whose image parts are text parts that hold marks; anything else stays as it is.

    Args:
      record: parsed JSON, see `moejax.data.conversations`.
      folder: that paths in it are relative to.
      where: file and line, for messages.
      images: those that lie with the record, instead of a list in it.
    Raises:
      ConfigError: an image that is no file here, or more or fewer `images` than parts for them.
    """
    if not isinstance(record, dict):
        return record
    listed = [*images] or record.get("images")
    files = _Files(listed if isinstance(listed, list) else [], folder, where)
    fields = {
        field: [_marked(message, files) for message in record[field]]
        for field in ("messages", "prompt", "completion")
        if isinstance(record.get(field), list)
    }
    if isinstance(record.get("prompt"), str) and files.left:
        fields["prompt"] = "".join(files.next().mark for _ in range(files.left)) + record["prompt"]
    if files.left:
        raise ConfigError(
            f"{where}: {files.left} of its {len(files.listed)} `images` have no part "
            '{"type": "image"} in the messages.'
        )
    return record | fields


class _Files:
    """The image files of a record: those that its parts name, and those of its list in turn."""

    def __init__(self, listed: list, folder: str, where: str):
        self.listed, self._folder, self._where, self._used = listed, folder, where, 0

    @property
    def left(self) -> int:
        return len(self.listed) - self._used

    def next(self) -> ImageRef:
        self._used += 1
        return self.of(self.listed[self._used - 1])

    def of(self, value: Any) -> ImageRef:
        if isinstance(value, ImageRef):
            return value
        if isinstance(value, dict):
            value = next((value[key] for key in ("url", "path") if value.get(key)), None)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self._where}: an image must be the path of a file, not {value!r}.")
        if value.startswith("file://"):
            value = value.removeprefix("file://")
        elif re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", value):
            shown = value if len(value) <= 40 else value[:37] + "..."
            raise ConfigError(
                f"{self._where}: the image {shown!r} is no file here. Save it, and write its path."
            )
        return ImageRef(os.path.normpath(os.path.join(self._folder, os.path.expanduser(value))))


def _marked(message: Any, files: _Files) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") in _KINDS:
            named = next((part[key] for key in _FIELDS if part.get(key)), None)
            if named is not None or files.left:
                ref = files.of(named) if named is not None else files.next()
                part = {"type": "text", "text": ref.mark}
        parts.append(part)
    return message | {"content": parts}
