"""Config section of low-rank adapters: which maps get them, how large, how they start."""

from __future__ import annotations

import dataclasses
import re

from moejax.config.fields import ConfigError, Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters over frozen weights, named and scaled as PEFT does."""

    _path = "lora."
    rank: int = setting(0, ge=0)
    alpha: float = setting(16.0, gt=0.0)
    rslora: bool = setting(False)
    dropout: float = setting(0.0, ge=0.0, lt=1.0)
    init: str = setting("default", choices=("default", "gaussian"))
    targets: tuple = setting((), items=str)
    target_regex: str = setting("")
    target_parameters: tuple = setting((), items=str)
    shared_a: bool = setting(False)
    rank_pattern: tuple = setting((), items=str)
    alpha_pattern: tuple = setting((), items=str)
    strict: bool = setting(False)
    base_format: str = setting("plain", choices=("plain", "int8", "fp8"))

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.target_regex)
        except re.error as error:
            raise ConfigError(
                f"lora.target_regex={self.target_regex!r} is no regular expression: {error}."
            ) from error
        for field in ("rank_pattern", "alpha_pattern"):
            for entry in getattr(self, field):
                _pattern_entry(field, entry)

    def rank_of(self, name: str) -> int:
        """Rank of the adapter on the map of this full name."""
        return int(self._matched("rank_pattern", name, self.rank))

    def scale_of(self, name: str) -> float:
        """What its product is multiplied by: alpha / r, or alpha / sqrt(r) with `rslora`.

        Source: LoRA, arXiv:2106.09685; rsLoRA, arXiv:2312.03732.
        """
        alpha, rank = self._matched("alpha_pattern", name, self.alpha), self.rank_of(name)
        return float(alpha / rank**0.5 if self.rslora else alpha / rank)

    def _matched(self, field: str, name: str, default: float) -> float:
        for entry in getattr(self, field):
            if pattern_matches(entry, name):
                return _pattern_entry(field, entry)[1]
        return default


def pattern_matches(entry: str, name: str) -> bool:
    """Whether an entry of a pattern field is for the map of this full name, by PEFT's rule."""
    return re.match(rf"(.*\.)?({entry.rpartition('=')[0]})$", name) is not None


def _pattern_entry(field: str, entry: str) -> tuple[str, float]:
    """Pattern and value of an entry like `o_proj=4`."""
    pattern, _, text = entry.rpartition("=")
    try:
        re.compile(pattern)
        value = float(text)
    except (re.error, ValueError):
        value = -1.0
    whole = field != "rank_pattern" or value == int(value)
    if not pattern or value <= 0 or not whole:
        kind = "a whole number" if field == "rank_pattern" else "a number"
        raise ConfigError(
            f"lora.{field} has {entry!r}: entries are like 'o_proj=4', the end of a name (or a "
            f"regular expression for it) and {kind} above 0."
        )
    return pattern, value
