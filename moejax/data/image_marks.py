"""Images inside the text of a record: each is a mark that names where its bytes lie.

Marks are private characters, which move through chat templates with the text around them. No text
of a record may hold them (`refuse_marks`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from moejax.config import ConfigError

_OPEN, _CLOSE, _FIELD = "\ue0f2", "\ue0f3", "\ue0f4"
# Names of files may hold them, and those of `chat_template`: a mark holds none but its own.
_ESCAPED = {"%": "%%", "\ue0f0": "%0", "\ue0f1": "%1", _OPEN: "%2", _CLOSE: "%3", _FIELD: "%4"}
_PLAIN = {escaped: plain for plain, escaped in _ESCAPED.items()}
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
        """What a message calls it, on one line."""
        shown = f"{self.file}:{self.name}" if self.name else self.file
        return shown if shown.isprintable() else repr(shown)

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
        names = ("".join(_ESCAPED.get(c, c) for c in name) for name in (self.file, self.name))
        return _OPEN + _FIELD.join([*names, str(self.start), str(self.size)]) + _CLOSE


def split_marks(text: str) -> Iterator[str | ImageRef]:
    """The texts and images of a text in their order; empty texts are left out."""
    at = 0
    for found in _MARK.finditer(text):
        if found.start() > at:
            yield text[at : found.start()]
        file, name, start, size = found[1].split(_FIELD)
        file, name = (re.sub("%.", lambda m: _PLAIN[m[0]], text) for text in (file, name))
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

    `images` (or `image`) is a list of files, or one. Beside a plain prompt they stand in front of
    it; in a message they take its parts without a file, or stand in front of its text; beside
    `messages` they take the parts of all of them in turn.

    Args:
      record: parsed JSON, see `moejax.data.conversations`.
      folder: that paths in it are relative to.
      where: file and line, for messages.
      images: those that lie with the record, instead of a list in it.
    Raises:
      ConfigError: an image that is no file here, or more or fewer images than parts for them.
    """
    if not isinstance(record, dict):
        return record
    files = _Files([*images] or _listed(record, where), folder, where)
    fields: dict[str, Any] = {
        field: [_marked(message, files) for message in record[field]]
        for field in ("messages", "prompt", "completion")
        if isinstance(record.get(field), list)
    }
    if isinstance(record.get("prompt"), str) and files.left:
        fields["prompt"] = files.rest() + record["prompt"]
    files.check_used("the messages")
    return record | fields


def listed_images(record: Mapping[str, Any], folder: str, where: str) -> list[ImageRef]:
    """The files under `images` or `image` of a parsed record; arguments as in `with_marks`.

    Raises:
      ConfigError: they are no files here.
    """
    files = _Files(_listed(record, where), folder, where)
    return [files.next() for _ in range(files.left)]


def _listed(record: Mapping[str, Any], where: str) -> list:
    """What stands under `images`, or is the one `image`; either may be a list or not."""
    named = [key for key in ("images", "image") if record.get(key) is not None]
    if not named:
        return []
    value = record[named[0]]
    if len(named) > 1 or not isinstance(value, str | list | dict):
        found = "both `images` and `image`" if len(named) > 1 else f"{named[0]}={value!r}"
        raise ConfigError(
            f'{where}: has {found}. Write "images": a list of files, or the path of one.'
        )
    return value if isinstance(value, list) else [value]


class _Files:
    """The image files of a record: those that its parts name, and those of its list in turn."""

    def __init__(self, listed: list, folder: str, where: str):
        self.listed, self._folder, self._where, self._used = listed, folder, where, 0

    @property
    def left(self) -> int:
        return len(self.listed) - self._used

    def rest(self) -> str:
        """The marks of all that are left."""
        return "".join(self.next().mark for _ in range(self.left))

    def check_used(self, what: str) -> None:
        """Raises ConfigError where some are left; `what` has no part for them."""
        if self.left:
            raise ConfigError(
                f"{self._where}: {self.left} of its {len(self.listed)} `images` have no part "
                f'{{"type": "image"}} in {what}: put one into `content` for each, or the `images` '
                "into the message that they belong to."
            )

    def of_message(self, message: Mapping[str, Any]) -> _Files:
        """Those of a message that has its own, else these."""
        own = _listed(message, self._where)
        return _Files(own, self._folder, self._where) if own else self

    def of_part(self, part: Mapping[str, Any]) -> ImageRef:
        """The file of a part that is an image: named in it, or the next of the list."""
        named = next((part[key] for key in _FIELDS if part.get(key)), None)
        if named is not None:
            return self.of(named)
        if not self.left:
            listed = f"after the {len(self.listed)} of `images`" if self.listed else "in `images`"
            raise ConfigError(
                f"{self._where}: a part of the type {part['type']!r} has no file: write its "
                f'"path", or name one more {listed}.'
            )
        return self.next()

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
            value = unquote(value.removeprefix("file://"))
        elif re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", value):
            shown = value if len(value) <= 40 else value[:37] + "..."
            raise ConfigError(
                f"{self._where}: the image {shown!r} is no file here. Save it, and write its path."
            )
        if "\0" in value:  # no file is called so, and functions of paths raise or cut it off
            return ImageRef(os.path.join(self._folder, value))
        return ImageRef(os.path.normpath(os.path.join(self._folder, os.path.expanduser(value))))


def _marked(message: Any, files: _Files) -> Any:
    """A message with marks; it may have files of its own, else its parts take the record's."""
    if not isinstance(message, dict):
        return message
    own, content = files.of_message(message), message.get("content")
    message = {key: value for key, value in message.items() if key not in ("images", "image")}
    if isinstance(content, list):
        before = own.left
        parts = [
            {"type": "text", "text": own.of_part(part).mark}
            if isinstance(part, dict) and part.get("type") in _KINDS
            else part
            for part in content
        ]
        if own is not files and own.left == before:
            parts = [{"type": "text", "text": own.rest()}, *parts]
        message["content"] = parts
    elif own is not files and isinstance(content, str | None):
        message["content"] = own.rest() + (content or "")
    if own is not files:
        own.check_used("its message")
    return message
