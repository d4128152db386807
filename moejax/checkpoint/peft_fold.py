"""What adapters, and whatever else a LoRA run trained, make of the stored tensors of a base."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from moejax.checkpoint.key_map import KeyMap
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_packing import LowRank
from moejax.checkpoint.peft_run import RunAdapters

Change = Callable[[np.ndarray], np.ndarray]


class Adapters(Protocol):
    """Adapters of a run or of a folder in PEFT's form."""

    names: PeftNames

    def maps(self) -> list[str]:
        """Names of the adapted maps."""
        ...

    def read(self, name: str) -> LowRank:
        """The adapter of a map."""
        ...


def changes_of(
    adapters: Adapters, key_map: KeyMap, trained: RunAdapters | None = None
) -> dict[str, Change]:
    """Stored tensor -> what becomes of it, float32 to float32, in its published layout.

    Args:
      trained: a run, whose other trained parameters and balancing state replace the base's.
    """
    changes: dict[str, Change] = {}
    if trained is not None:
        own = {name.partition("/")[2]: name for name in trained.others}
        for name, entry in key_map.entries.items():
            if all(leaf in own for leaf, _ in entry.places):
                changes[name] = functools.partial(_replaced, key_map, name, trained, own)
    names, last = adapters.names, functools.lru_cache(maxsize=1)(adapters.read)
    for name in adapters.maps():
        for stored, expert, half in _stored(names, name):
            fold = functools.partial(_folded, last, name, expert, half, changes.get(stored))
            changes[stored] = fold
    return changes


def _stored(names: PeftNames, name: str) -> Iterator[tuple[str, int | None, int | None]]:
    """(stored tensor, expert, gate or up) of everything that a map consists of."""
    one = names.maps[name]
    if not one.num_experts:
        yield f"{name}.weight", None, None
        return
    words = names.expert_words(one)
    for half, word in enumerate(words):
        for e in range(one.num_experts):
            yield f"{names.expert_path(one, e, word)}.weight", e, half if len(words) > 1 else None


def _folded(
    read: Callable[[str], LowRank], name: str, expert: int | None, half: int | None,
    before: Change | None, weight: np.ndarray,
) -> np.ndarray:  # fmt: skip
    weight = before(weight) if before else weight
    rows = slice(None)
    if half is not None:
        rows = slice(half * weight.shape[0], (half + 1) * weight.shape[0])
    return weight + read(name).delta(expert, rows)


def _replaced(
    key_map: KeyMap, name: str, trained: RunAdapters, own: Mapping[str, str], weight: np.ndarray
) -> np.ndarray:
    found = key_map.to_theirs(name, lambda leaf, index: trained.read_leaf(own[leaf], index))
    return found.astype(np.float32).reshape(weight.shape)


def folded_names(adapters: Adapters) -> list[str]:
    """Stored tensors that adapters change, experts one by one."""
    return [one for name in adapters.maps() for one, _, _ in _stored(adapters.names, name)]
