"""Config sections as frozen dataclasses whose fields carry their allowed range.

A section is declared with :func:`setting`; :class:`Section` checks every range when an instance is
made, so that a wrong value is one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used: its message is one line, meant for the user."""


def setting(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Iterable[str] | None = None,
    items: type | None = None,
    section: type | None = None,
) -> Any:
    """A dataclass field with a default and a documented range.

    Args:
      default: the value when the config does not name the field; its type is the field's type.
      ge, gt, le, lt: bounds of a number (inclusive or exclusive).
      choices: the allowed values of a string.
      items: type of every entry of a tuple.
      section: the `Section` that every entry of a tuple becomes; entries are mappings in a config.
    """
    limits = {
        name: bound
        for name, bound in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items()
        if bound is not None
    }
    metadata = {
        "limits": limits,
        "choices": tuple(choices) if choices else None,
        "items": items,
        "section": section,
    }
    return dataclasses.field(default=default, metadata=metadata)


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_HOLDS = {
    "ge": lambda value, bound: value >= bound,
    "gt": lambda value, bound: value > bound,
    "le": lambda value, bound: value <= bound,
    "lt": lambda value, bound: value < bound,
}


def allowed(field: dataclasses.Field) -> str:
    """The documented range of a field in words, empty when any value of its type will do."""
    if field.metadata.get("choices"):
        return "one of " + ", ".join(repr(c) for c in field.metadata["choices"])
    limits = field.metadata.get("limits", {})
    return " and ".join(f"{_SIGNS[name]} {bound:g}" for name, bound in limits.items())


def _check_field(section: str, field: dataclasses.Field, value: Any) -> None:
    choices, limits = field.metadata.get("choices"), field.metadata.get("limits", {})
    items, must = field.metadata.get("items"), allowed(field)
    ok = value in choices if choices else True
    if isinstance(value, float) and not math.isfinite(value):
        ok, must = False, " and ".join(filter(None, ("finite", must)))
    elif limits:
        ok = all(_HOLDS[name](value, bound) for name, bound in limits.items())
    elif items:
        ok = all(isinstance(item, items) for item in value)
        must = f"a tuple of {items.__name__} like ('a', 'b')"
    if not ok:
        raise ConfigError(f"{section}{field.name}={value!r} is not allowed: it must be {must}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of every config section: checks ranges on construction, builds itself from a mapping."""

    def __post_init__(self) -> None:
        prefix = type(self).path()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Section):
                _check_field(prefix, field, value)

    @classmethod
    def path(cls) -> str:
        """Dotted place of the section in the config, with the final dot; empty for the whole."""
        return getattr(cls, "_path", "")

    def replace(self, **changes: Any):
        """A copy with some fields changed (checked again)."""
        return dataclasses.replace(self, **changes)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to `name`, best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)


# What other trainers call our fields: spelled too differently to be found by likeness.
_ALSO_CALLED = {
    "beta1": "adam_b1",
    "beta2": "adam_b2",
    "hidden_size": "dim",
    "learning_rate": "lr",
    "max_steps": "num_steps",
    "sequence_length": "seq_len",
    "steps": "num_steps",
}


def unknown_field_message(name: str, known: Iterable[str]) -> str:
    """One line for a field that does not exist: the nearest names, or all when none is near."""
    known = sorted(known)
    section, dot, leaf = name.rpartition(".")
    meant = section + dot + _ALSO_CALLED.get(leaf, leaf)
    near = [k for k in known if k == meant or (not section and k.endswith(f".{meant}"))]
    near = (near + [k for k in nearest(name, known) if k not in near])[:3] or nearest(
        leaf, [k.rsplit(".", 1)[-1] for k in known]
    )
    if near:
        by_leaf = {k.rsplit(".", 1)[-1]: k for k in known}
        full = [by_leaf.get(n, n) if n not in known else n for n in near]
        return f"unknown config field {name!r}; nearest: {', '.join(dict.fromkeys(full))}."
    return f"unknown config field {name!r}; known here: {listed(known)}."


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names joined by commas, the first few of many."""
    names = list(names)
    more = f", ... ({len(names)} fields)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _coerce(name: str, value: Any, default: Any) -> Any:
    """`value` as the type of the field's default; a wrong type is a one-line error."""
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(tuple(v) if isinstance(v, list | tuple) else v for v in value)
    if type(value) is not kind:
        raise ConfigError(
            f"{name}={value!r} has type {type(value).__name__}; it must be {kind.__name__}."
        )
    return value


def build_section(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """An instance of the section `cls` from nested mappings.

    Raises:
      ConfigError: an unknown field (named with its nearest neighbours), a wrong type, or a value
        out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ConfigError(unknown_field_message(prefix + name, [prefix + f for f in fields]))
    given = {}
    for name, value in values.items():
        default = _default_of(fields[name])
        if entry := fields[name].metadata.get("section"):
            given[name] = section_entries(entry, value, prefix + name)
        elif isinstance(default, Section):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{prefix}{name} is a section with fields, not the value {value!r}."
                )
            given[name] = build_section(type(default), value, f"{prefix}{name}.")
        else:
            given[name] = _coerce(prefix + name, value, default)
    return cls(**given)


def section_entries(cls: Any, value: Any, name: str) -> tuple[Any, ...]:
    """Sections from a sequence of mappings, or from a mapping of name -> mapping."""
    if isinstance(value, Mapping):
        if not all(isinstance(entry, Mapping) for entry in value.values()):
            raise ConfigError(f"{name} is a tuple of mappings, or maps a name to a mapping.")
        value = [{"name": key, **entry} for key, entry in value.items()]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name}={value!r} is not a tuple of mappings.")
    made = []
    for place, entry in enumerate(value):
        if isinstance(entry, Section):
            made.append(entry)
            continue
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{name}[{place}]={entry!r} is not a mapping of fields.")
        try:
            made.append(build_section(cls, entry, f"{name}[{place}]."))
        except ConfigError as error:
            # A range is checked where the entry is made, which does not know its own place.
            inside = str(error)
            if inside.startswith(cls.path()):
                inside = f"{name}[{place}].{inside.removeprefix(cls.path())}"
            raise ConfigError(inside) from error
    return tuple(made)


def _default_of(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory()  # type: ignore[operator]


def as_dict(section: Section) -> dict[str, Any]:
    """The section as nested plain dictionaries (tuples stay tuples)."""
    out = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, tuple):
            value = tuple(as_dict(item) if isinstance(item, Section) else item for item in value)
        out[field.name] = as_dict(value) if isinstance(value, Section) else value
    return out


def flat_names(section: Section, prefix: str = "") -> dict[str, Any]:
    """Dotted leaf names of a section to their values."""
    out: dict[str, Any] = {}
    for name, value in as_dict(section).items():
        if isinstance(value, dict):
            out |= flat_names(getattr(section, name), f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
