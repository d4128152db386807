"""WebDataset shards: tar files of images and captions, read where they lie.

Files of one sample stand behind each other and have one name up to the first dot of the last path
part: `000123.jpg`, `000123.txt`. The caption is a `.txt`, or a field of a `.json`, which may also
hold `messages`. Nothing is unpacked: a member's name is only a name, and links are not followed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from moejax.config import ConfigError, SourceFields
from moejax.data.conversations import parse_record
from moejax.data.corpus import Split, in_split, reason
from moejax.data.image_marks import ImageRef
from moejax.data.paths import matches

IMAGE_SUFFIXES = ("bmp", "gif", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp")
_TEXT_BYTES = 2**24  # a caption that is longer is none


class _Member(NamedTuple):
    suffix: str
    ref: ImageRef


def tar_documents(cfg: SourceFields, split: Split) -> list[tuple[str, str]]:
    """The (name, record as JSON) pairs of one split of .tar files, in the form of conversations.

    Raises:
      ConfigError: a file is no tar file, is compressed, or a sample lacks its image or caption.
    """
    held_out = split == "validation" and cfg.validation_paths
    field, paths = ("validation_paths", cfg.validation_paths) if held_out else ("paths", cfg.paths)
    documents = [
        (f"{name}:{key}", json.dumps(record, ensure_ascii=False))
        for path, name in matches(paths, field=f"data.{field}").items()
        for key, record in _records(path, cfg.text_field)
    ]
    if not documents:
        raise ConfigError(f"data.{field}={paths!r} hold no samples: every file is empty.")
    if cfg.validation_paths:
        return documents
    return in_split(documents, lambda document: document[0], split, cfg.validation_percent)


def _records(path: str, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, members in _samples(path):
        yield key, _record(f"{path}:{key}", members, field)


def _samples(path: str) -> Iterator[tuple[str, list[_Member]]]:
    """Neighbours of one key; a key that comes again later is another sample with its own number."""
    seen: dict[str, int] = {}
    key = ""
    members: list[_Member] = []
    for member in _members(path):
        folder, slash, file = member.ref.name.rpartition("/")
        stem, _, suffix = file.partition(".")
        own = folder + slash + stem
        if members and own != key:
            yield _counted(seen, key), members
            members = []
        key = own
        members.append(member._replace(suffix=suffix.lower()))
    if members:
        yield _counted(seen, key), members


def _counted(seen: dict[str, int], key: str) -> str:
    seen[key] = seen.get(key, 0) + 1
    return key if seen[key] == 1 else f"{key}#{seen[key]}"


def _members(path: str) -> Iterator[_Member]:
    """The plain files in a tar, by where their bytes stand."""
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                if info.isreg() and not info.issparse() and not _is_beside(info.name):
                    ref = ImageRef(path, info.name, info.offset_data, info.size)
                    yield _Member("", ref)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a readable tar file ({reason(error)}). Shards are plain .tar, not "
            "compressed: their members are read one by one."
        ) from error


def _is_beside(name: str) -> bool:
    """Whether a member holds what macOS keeps beside a file, under the file's own name."""
    return name.startswith("__MACOSX/") or name.rpartition("/")[2].startswith("._")


def _record(where: str, members: list[_Member], field: str) -> dict[str, Any]:
    by_suffix = {member.suffix: member.ref for member in members}
    images = [m.ref for m in members if m.suffix.rpartition(".")[2] in IMAGE_SUFFIXES]
    if "json" in by_suffix:
        raw = _json(where, by_suffix["json"])
        if "messages" in raw:
            return parse_record(json.dumps(raw), where, images=images)
        caption = raw.get(field, raw.get("caption"))
    else:
        caption = _text(where, by_suffix["txt"]) if "txt" in by_suffix else None
    if not isinstance(caption, str) or not caption:
        raise ConfigError(
            f"{where}: no caption: a .txt beside the image, or {field!r} in a .json (it has "
            f"{', '.join(sorted(by_suffix)) or 'nothing'})."
        )
    if not images:
        raise ConfigError(f"{where}: no image; it has {', '.join(sorted(by_suffix))}.")
    line = json.dumps({"prompt": "", "completion": caption})
    return parse_record(line, where, images=images)


def _json(where: str, ref: ImageRef) -> dict[str, Any]:
    try:
        raw = json.loads(_text(where, ref))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}.json: not JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}.json: must be a JSON object, not {type(raw).__name__}.")
    return raw


def _text(where: str, ref: ImageRef) -> str:
    if ref.size > _TEXT_BYTES:
        raise ConfigError(f"{where}: its text has {ref.size:,} bytes; at most {_TEXT_BYTES:,}.")
    source = ref.source()
    assert isinstance(source, bytes)
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text (byte {error.start}).") from error
