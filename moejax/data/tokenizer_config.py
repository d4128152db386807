"""What `tokenizer_config.json` and `generation_config.json` say of a tokenizer's special tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from moejax.config import ConfigError

CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Names and ids of the tokens that are no text.

    Attributes:
      names: id to name, of the added tokens.
      shown: ids of added tokens that are part of the text when decoded ("special": false).
      bos: name of the token that begins a text, None if there is none.
      eos: name of the configured end token; for chat models the end of a turn.
      pad: name of the padding token.
      stop_ids: ids at which generation ends, from `generation_config.json`.
    """

    names: dict[int, str] = dataclasses.field(default_factory=dict)
    shown: frozenset[int] = frozenset()
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    stop_ids: tuple[int, ...] = ()


def read_special_tokens(folder: Path) -> SpecialTokens:
    """The special tokens as the two files in `folder` have them; a missing file says nothing.

    Raises:
      ConfigError: a file is no JSON object, or an entry has a form that is not known.
    """
    path = folder / CONFIG_FILE
    config = read_object(path)
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ConfigError(f"tokenizer {path}: added_tokens_decoder is not an object.")
    names: dict[int, str] = {}
    shown = set()
    for key, entry in added.items():
        if not (key.isascii() and key.isdigit()) or not isinstance(entry, dict):
            raise ConfigError(
                f"tokenizer {path}: added_tokens_decoder[{key!r}] must be an id with an object."
            )
        names[int(key)] = _name(path, f"added_tokens_decoder[{key!r}]", entry) or ""
        if entry.get("special") is False:
            shown.add(int(key))
    bos, eos, pad = (_name(path, f"{key}_token", config.get(f"{key}_token")) for key in _ENDS)
    return SpecialTokens(names, frozenset(shown), bos, eos, pad, _stop_ids(folder))


_ENDS = ("bos", "eos", "pad")


def _name(path: Path, key: str, entry: Any) -> str | None:
    """A token's name: a string, or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
        if not isinstance(entry, str):
            raise ConfigError(f"tokenizer {path}: {key} has no content string.")
    if entry is not None and not isinstance(entry, str):
        raise ConfigError(f"tokenizer {path}: {key} must be a string or an object with content.")
    return entry


def _stop_ids(folder: Path) -> tuple[int, ...]:
    path = folder / GENERATION_FILE
    ids = read_object(path).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(f"tokenizer {path}: eos_token_id {token!r} is not a token id.")
    return tuple(ids)


def read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"tokenizer {path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer {path}: not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise ConfigError(f"tokenizer {path}: must be a JSON object, not {type(data).__name__}.")
    return data
