"""Applies the name tables of `moejax.models.hf_keys`: stored tensor <-> places in the tree.

A leaf of the tree stacks layers, experts, gate and up; a stored tensor is one matrix of one layer.
So every stored tensor is a rectangle of one or two leaves, turned; nothing is ever stacked here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from moejax.checkpoint.layout import named_leaves
from moejax.layers.param import is_kept_float32
from moejax.models.decoder import layer_kinds
from moejax.models.grouping import layer_places
from moejax.models.hf_keys import (
    MODEL_RULES,
    VISION_BLOCK,
    VISION_BLOCK_RULES,
    VISION_RULES,
    Spelling,
    TensorRule,
    layer_rules,
)
from moejax.models.parts import ModelParts

Index = tuple[int | slice, ...]


class Piece(NamedTuple):
    """A rectangle of a leaf: its name (`stack0/run1/attn/q`), the index in it, and its values."""

    leaf: str
    at: Index
    array: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a rule turns one layer's tensor: sizes of all dims, and the order on either side."""

    rule: TensorRule
    split: tuple[int, ...]  # the stored tensor with merged dims taken apart
    orders: tuple[tuple[int, ...], ...]  # stored dims in the order of each part
    spans: tuple[slice, ...]  # of each part along the concatenated dim
    axis: int  # place of the concatenated dim in `split`, -1 without one
    stored: tuple[int, ...]  # shape as stored

    def parts_of(self, array: np.ndarray) -> Iterator[np.ndarray]:
        """The stored tensor cut and turned into the dims of each part's leaf."""
        apart = array.reshape(self.split)
        for order, span in zip(self.orders, self.spans, strict=True):
            cut = apart if self.axis < 0 else apart[(slice(None),) * self.axis + (span,)]
            yield np.transpose(cut, order)

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """The inverse of :meth:`parts_of`."""
        turned = []
        for part, order in zip(parts, self.orders, strict=True):
            turned.append(np.transpose(part, np.argsort(order)))
        whole = turned[0]
        if self.axis >= 0:
            whole = np.concatenate(turned, self.axis)
        return np.ascontiguousarray(whole.reshape(self.stored))


class Entry(NamedTuple):
    """A stored tensor: its name, shape, and the leaves and indices that its parts fill."""

    name: str
    shape: tuple[int, ...]
    places: tuple[tuple[str, Index], ...]
    form: _Form
    optional: bool

    @property
    def float32(self) -> bool:
        """Whether it is stored in 32 bits whatever the other tensors are."""
        return any(is_kept_float32(leaf.replace("/", ".")) for leaf, _ in self.places)


class KeyMap:
    """All stored tensors of a model in one family's spelling.

    Args:
      parts: the model as data; its abstract parameters and balancing state give every shape.
      spelling: the family's names.
      num_mtp: layers behind the model's own that may be there, and are carried.
    """

    def __init__(self, parts: ModelParts, spelling: Spelling, num_mtp: int = 0):
        self.parts, self.spelling, self._num_mtp = parts, spelling, num_mtp
        self.leaves = {**named_leaves(parts.params), **named_leaves(parts.balance)}
        self._words = dataclasses.asdict(spelling)
        self._head_dim = parts.cfg.kda.head_dim

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> entry of every tensor that the model has, in the order of layers."""
        out = {entry.name: entry for entry in self._model_entries()}
        runs = [(f"stack{s}/run{r}", place) for s, r, place in layer_places(self.parts.segments)]
        kinds = layer_kinds(self.parts.cfg)
        forms: dict[str, list[tuple[TensorRule, _Form]]] = {}
        for i, (prefix, place) in enumerate(runs):
            if prefix not in forms:
                forms[prefix] = list(self._forms(prefix, kinds[i].attention, kinds[i].ffn))
            for rule, form in forms[prefix]:
                for entry in self._layer_entries(rule, form, prefix, place, i):
                    out[entry.name] = entry
        return out | {entry.name: entry for entry in self._vision_entries()}

    def kind(self, name: str) -> str:
        """`mapped` (a tensor of the model), `carried` (kept as it is) or `unexpected`."""
        if name in self.entries:
            return "mapped"
        prefix = self.spelling.prefix
        layer = re.match(re.escape(prefix) + r"model\.layers\.(\d{1,9})\.", name)
        own = self.parts.num_layers
        beyond = layer is not None and own <= int(layer[1]) < own + self._num_mtp
        if beyond or name.startswith(self.spelling.carried or ("\0",)):
            return "carried"
        return "carried" if name.endswith("rotary_emb.inv_freq") else "unexpected"

    def to_ours(self, name: str, array: np.ndarray) -> Iterator[Piece]:
        """Where the values of a stored tensor belong.

        Args:
          name: a key of :attr:`entries`.
          array: the tensor in its stored shape (a padded one may be longer), any dtype.
        """
        entry = self.entries[name]
        if entry.form.rule.padded:
            array = array.reshape(-1)[: math.prod(entry.form.split)]
        for (leaf, index), part in zip(entry.places, entry.form.parts_of(array), strict=True):
            yield Piece(leaf, index, part)

    def to_theirs(self, name: str, read: Callable[[str, Index], np.ndarray]) -> np.ndarray:
        """The stored tensor from the tree.

        Args:
          read: gives the values of a leaf at an index.
        """
        entry = self.entries[name]
        parts = [np.asarray(read(leaf, index)) for leaf, index in entry.places]
        if not entry.form.rule.padded:
            return entry.form.joined(parts)
        flat = parts[0].reshape(-1)
        room = math.prod(entry.shape) - flat.size
        return np.concatenate([flat, np.zeros(room, flat.dtype)]).reshape(entry.shape)

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be read as `name`."""
        entry = self.entries[name]
        live = math.prod(entry.form.split)
        if entry.form.rule.padded:
            return math.prod(shape) == live or (len(shape) == 1 and shape[0] >= live)
        return tuple(shape) == entry.shape

    def _model_entries(self) -> Iterator[Entry]:
        for rule in MODEL_RULES:
            leaf = rule.parts[0].leaf.replace(".", "/")
            if leaf in self.leaves:
                form = _form(rule, [self.leaves[leaf].shape])
                name = self.spelling.prefix + rule.name.format_map(self._words)
                index = (slice(None),) * len(self.leaves[leaf].shape)
                yield Entry(name, form.stored, ((leaf, index),), form, False)

    def _vision_entries(self) -> Iterator[Entry]:
        """Tensors of the tower and its projector; none where the model has no tower."""
        blocks = range(self.parts.cfg.vision.num_layers)
        for rules, owner, places in (
            (VISION_RULES, "vision", ((),)),
            (VISION_BLOCK_RULES, "vision/blocks", tuple((i,) for i in blocks)),
        ):
            for rule in rules:
                leaf = f"{owner}/{rule.parts[0].leaf.replace('.', '/')}"
                if leaf not in self.leaves:
                    continue
                for place in places:
                    shape = self.leaves[leaf].shape[len(place) :]
                    form = _form(rule, [shape])
                    start = "".join(f"{VISION_BLOCK}{i}." for i in place)
                    index: Index = (*place, *(slice(None) for _ in shape))
                    yield Entry(start + rule.name, form.stored, ((leaf, index),), form, False)

    def _forms(self, prefix: str, attention: str, ffn: str) -> Iterator[tuple[TensorRule, _Form]]:
        packed = self.parts.cfg.moe.expert_format == "mxfp4"
        for rule in layer_rules(attention, ffn, packed=packed):
            leaves = [f"{prefix}/{part.leaf.replace('.', '/')}" for part in rule.parts]
            if all(leaf in self.leaves for leaf in leaves):
                yield rule, _form(rule, [self.leaves[leaf].shape[2:] for leaf in leaves])

    def _layer_entries(
        self, rule: TensorRule, form: _Form, prefix: str, place: tuple[int, int], layer: int
    ) -> Iterator[Entry]:
        experts = range(self.parts.cfg.moe.num_experts) if "{e}" in rule.name else (None,)
        template = rule.name.replace("{e}", "{{e}}").format_map(self._words)
        start = f"{self.spelling.prefix}model.layers.{layer}."
        shape = self._stored_shape(rule, form)
        for e in experts:
            places = []
            for part in rule.parts:
                index: list[int | slice] = list(place)
                for dim in part.dims.split():
                    fixed = int(dim) if dim.isdigit() else slice(None)
                    index.append(e if dim == "e" and e is not None else fixed)
                places.append((f"{prefix}/{part.leaf.replace('.', '/')}", tuple(index)))
            name = start + (template if e is None else template.replace("{e}", str(e)))
            optional = rule.optional_first and layer == 0
            yield Entry(name, shape, tuple(places), form, optional)

    def _stored_shape(self, rule: TensorRule, form: _Form) -> tuple[int, ...]:
        if not rule.padded:
            return form.stored
        live = math.prod(form.split)
        if self.spelling.a_log == "padded":
            return (max(live, self._head_dim),)
        return (1, 1, live, 1) if self.spelling.a_log == "1 1 n 1" else (live,)


def _form(rule: TensorRule, shapes: list[tuple[int, ...]]) -> _Form:
    """The turning of a rule for leaves of these shapes (stacked dims left out)."""
    sizes: list[dict[str, int]] = []
    for part, shape in zip(rule.parts, shapes, strict=True):
        sizes.append(dict(zip(part.dims.split(), shape, strict=True)))
    words = re.findall(r"\(([^)]*)\)|(\S+)", rule.theirs)
    groups = [(merged or single).split() for merged, single in words]
    letters = [dim for group in groups for dim in group if dim != "1"]
    whole = dict(sizes[0])
    spans, end = [], 0
    for own in sizes:
        width = own.get(rule.concat, 0)
        spans.append(slice(end, end + width))
        end += width
    if rule.concat:
        whole[rule.concat] = end
    orders = []
    for part in rule.parts:
        free = [d for d in part.dims.split() if not d.isdigit() and d in letters]
        orders.append(tuple(letters.index(d) for d in free))
    stored = tuple(math.prod(whole.get(d, 1) for d in group) for group in groups)
    return _Form(
        rule,
        tuple(whole[d] for d in letters),
        tuple(orders),
        tuple(spans),
        letters.index(rule.concat) if rule.concat else -1,
        stored,
    )
