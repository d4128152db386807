"""A Hugging Face folder as a source of our leaves: which key goes where, decoded when read.

Whole leaves are never built here unless asked for: a reader asks for a rectangle of a leaf (one
device's share) and only the stored tensors that meet it are read.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from moejax.checkpoint import quant
from moejax.checkpoint.hf_folder import HfFolder
from moejax.checkpoint.key_map import Index, KeyMap, Piece
from moejax.checkpoint.layout import CheckpointError, named_leaves
from moejax.checkpoint.safetensors_file import DTYPES
from moejax.models.hf_config import FAMILIES, UnsupportedError, num_mtp_layers, read_hf_config
from moejax.models.hf_keys import known_names
from moejax.models.parts import model_parts
from moejax.typing import PyTree

_PACKED, _SCALE, _SCALE_INV = "_packed", "_scale", "_scale_inv"
_BF16 = np.dtype(ml_dtypes.bfloat16)
_FP8 = ("F8_E4M3",)
_PLAIN = ("F32", "BF16", "F16")


class Stored(NamedTuple):
    """How a tensor lies in the folder, and the keys it is made of.

    `kind` is `plain`, `mxfp4` or `fp8`; `packed` is one of the two keys of an MXFP4 tensor that is
    not decoded.
    """

    kind: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str  # safetensors name of the (first) stored tensor

    def exact_dtype(self) -> np.dtype:
        """The smallest of our types that holds the values (fp8 products rounded to bfloat16)."""
        if self.kind == "packed":
            return np.dtype(np.uint8)
        if self.kind != "plain":
            return _BF16
        dtype = np.dtype(DTYPES[self.dtype])
        return dtype if dtype in (_BF16, np.dtype(np.float32)) else np.dtype(np.float32)


class HfSource:
    """A checked folder.

    Attributes:
      folder: the files.
      raw_config: its `config.json`.
      family, cfg, parts, map: what model it is, and where its tensors go.
      stored: name -> how it is stored, of every tensor of the folder.
      tensors: the same of every tensor of the model; packed experts by key.
      carried: names that belong to no part of ours and are kept as they are.
      absent: tensors of the model that the folder may lack, and does.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        allow_unexpected: Collection[str] = (),
        packed: bool = False,
    ):
        """
        Args:
          path: folder of config.json and safetensors.
          allow_unexpected: names (or beginnings of names) that may be there although no part of the
            model answers to them; they are carried.
          packed: routed experts in MXFP4 stay as they are: leaves of codes and of scales.
        Raises:
          UnsupportedError: a family, or a part of one, that is not ours.
          CheckpointError: names the first key that is missing, unexpected or of another shape, or
            the first expert that is not MXFP4 although it is to stay packed.
        """
        self.folder = HfFolder(path)
        self.raw_config = self.folder.config
        keys = self.folder.keys()
        try:
            vision = _has_tower(keys, tuple(allow_unexpected))
            self.family, self.cfg = read_hf_config(self.raw_config, vision=vision)
        except UnsupportedError as error:
            raise self._with_tensor(error, keys) from error
        self._check_blocks()
        self.stored = _gather(keys, self.folder)
        if packed:
            if all(tensor.kind != "mxfp4" for tensor in self.stored.values()):
                raise CheckpointError(
                    f"{self.folder.path}: no tensor is MXFP4, so no experts can stay packed. "
                    "Import them unpacked."
                )
            self.cfg = self.cfg.replace(moe=self.cfg.moe.replace(expert_format="mxfp4"))
        self.parts = model_parts(self.cfg)
        self.map = KeyMap(self.parts, self.family.spelling, num_mtp_layers(self.raw_config))
        stored = self._kept_packed() if packed else self.stored
        self.carried = self._sort_out(stored, tuple(allow_unexpected))
        self.tensors = {name: s for name, s in stored.items() if name not in self._extra}
        self.absent = self._check()
        self._by_leaf: dict[str, list[tuple[str, Index]]] = {}
        for name in self.tensors:
            for leaf, index in self.map.entries[name].places:
                self._by_leaf.setdefault(leaf, []).append((name, index))

    def _kept_packed(self) -> dict[str, Stored]:
        """The stored tensors with codes and scales of experts each for itself."""
        out: dict[str, Stored] = {}
        for name, tensor in self.stored.items():
            if f"{name}_packed" not in self.map.entries:
                out[name] = tensor
            elif tensor.kind != "mxfp4":
                raise CheckpointError(
                    f"{self.folder.file_of(tensor.keys[0])}, key {name}: experts of type "
                    f"{tensor.dtype} are not packed. Only MXFP4 stays packed; import unpacked."
                )
            else:
                shapes = (self.folder.keys()[key][1] for key in tensor.keys)
                out |= {
                    key: Stored("packed", (key,), shape, "U8")
                    for key, shape in zip(tensor.keys, shapes, strict=True)
                }
        return out

    def _check_blocks(self) -> None:
        """fp8 comes in blocks of 128 x 128; others would be read wrongly, not refused, later."""
        quantised = self.raw_config.get("quantization_config") or {}
        block = quantised.get("weight_block_size", [quant.FP8_BLOCK] * 2)
        if list(block) != [quant.FP8_BLOCK] * 2:
            raise CheckpointError(
                f"{self.folder.path}: config.json: quantization_config.weight_block_size={block} "
                f"is not supported: only [{quant.FP8_BLOCK}, {quant.FP8_BLOCK}] is."
            )

    def _with_tensor(self, error: UnsupportedError, keys: Mapping[str, Any]) -> CheckpointError:
        known = set().union(*(known_names(f.spelling) for f in FAMILIES.values()))
        ends = (_PACKED, _SCALE, _SCALE_INV)
        for key in sorted(keys, key=_natural):
            name = re.sub(r"(?<=\.)\d+(?=\.)", "0", key)
            if name not in known and not (name.endswith(ends) and name.rpartition("_")[0] in known):
                return CheckpointError(f"{self.folder.path}: {error} First tensor of it: {key}.")
        return CheckpointError(f"{self.folder.path}: {error}")

    def _sort_out(self, stored: Mapping[str, Stored], allowed: tuple[str, ...]) -> list[str]:
        self._extra: set[str] = set()
        for name, tensor in stored.items():
            kind = self.map.kind(name)
            if kind == "unexpected" and not (allowed and name.startswith(allowed)):
                raise CheckpointError(
                    f"{self.folder.file_of(tensor.keys[0])}, key {tensor.keys[0]}: no part of a "
                    f"{self.raw_config.get('model_type')} model answers to it. "
                    f"To carry it along unused: --allow={name}"
                )
            if kind != "mapped":
                self._extra.add(name)
        return [key for name in stored if name in self._extra for key in stored[name].keys]

    def _check(self) -> list[str]:
        absent = []
        for name, entry in self.map.entries.items():
            tensor = self.tensors.get(name)
            if tensor is None and not entry.optional:
                files = list(self.folder.files)
                where = files[0] if len(files) == 1 else f"all {len(files)} files"
                raise CheckpointError(f"{self.folder.path}: key {name} is missing from {where}.")
            if tensor is None:
                absent.append(name)
            elif tensor.kind == "plain" and tensor.dtype not in _PLAIN:
                raise CheckpointError(
                    f"{self.folder.file_of(tensor.keys[0])}, key {name}: weights of type "
                    f"{tensor.dtype} are not read; {', '.join(_PLAIN)}, fp8 and MXFP4 are."
                )
            elif not self.map.fits(name, tensor.shape):
                raise CheckpointError(
                    f"{self.folder.file_of(tensor.keys[0])}, key {name}: shape "
                    f"{list(tensor.shape)}, but config.json asks for {list(entry.shape)}."
                )
        return absent

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """A tensor of the model, decoded, in its stored shape."""
        tensor = self.tensors[name]
        if tensor.kind == "mxfp4":
            codes, scales = map(self.folder.read, tensor.keys)
            return quant.mxfp4_decode(codes, scales, dtype=dtype)
        if tensor.kind == "fp8":
            codes, scales = map(self.folder.read, tensor.keys)
            return quant.fp8_block_decode(codes, scales, dtype=dtype)
        if tensor.kind == "packed":
            return self.folder.read(name)
        return self.folder.read(name).astype(dtype, copy=False)

    def pieces(self, name: str, dtype: Any = np.float32) -> Iterator[Piece]:
        """A tensor of the model as rectangles of our leaves."""
        return self.map.to_ours(name, self.read(name, dtype))

    def leaf_dtype(self, leaf: str) -> np.dtype:
        """The type that holds all tensors of a leaf: float32 as soon as one is, bits for bits."""
        kinds = {self.tensors[name].exact_dtype() for name, _ in self._by_leaf.get(leaf, ())}
        return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

    def read_leaf(self, leaf: str, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
        """The values of a leaf in a rectangle; places that the folder lacks are zero.

        Args:
          index: slices, one a dim, as `jax.make_array_from_callback` gives them.
        """
        shape = self.map.leaves[leaf].shape
        spans = [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
        out = np.zeros([len(span) for span in spans], dtype)
        for name, place in self._by_leaf.get(leaf, ()):
            if all(p in span for p, span in zip(place, spans, strict=True) if isinstance(p, int)):
                target = tuple(
                    p - span.start if isinstance(p, int) else slice(None)
                    for p, span in zip(place, spans, strict=True)
                )
                cut = tuple(
                    slice(span.start, span.stop)
                    for p, span in zip(place, spans, strict=True)
                    if not isinstance(p, int)
                )
                (array,) = (
                    piece.array
                    for piece in self.pieces(name, dtype)
                    if (piece.leaf, piece.at) == (leaf, place)
                )
                out[target] = array[cut]
        return out

    def load(self, abstract: PyTree, root: str = "") -> PyTree:
        """The model's arrays in the shapes, types and shardings of `abstract`.

        Every device's share is read for itself; a whole leaf is in memory only where a device
        holds it whole.

        Args:
          abstract: tree of jax.ShapeDtypeStruct: parameters, or balancing state.
        """
        leaves = [
            self.load_leaf(root + leaf, want) for leaf, want in named_leaves(abstract).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def load_leaf(self, leaf: str, want: jax.ShapeDtypeStruct) -> jax.Array:
        """One leaf; without a sharding it goes to the first device."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.make_array_from_callback(
            want.shape,
            getattr(want, "sharding", None) or here,
            lambda index: self.read_leaf(leaf, index or (), want.dtype),
        )


def _gather(keys: Mapping[str, tuple[str, tuple[int, ...]]], folder: HfFolder) -> dict[str, Stored]:
    """Stored tensors under the name of the weight that they are, scales with their codes."""
    out: dict[str, Stored] = {}
    scales = set()
    for key, (dtype, shape) in keys.items():
        if key.endswith(_PACKED):
            name = key.removesuffix(_PACKED)
            scale = _needs(name + _SCALE, key, keys, folder)
            if (dtype, keys[scale][0]) != ("U8", "U8"):
                raise CheckpointError(
                    f"{folder.file_of(key)}, key {key}: {dtype} codes with {keys[scale][0]} scales "
                    "are not MXFP4 (U8 and U8); other packings are not read."
                )
            out[name] = Stored("mxfp4", (key, scale), (*shape[:-1], 2 * shape[-1]), dtype)
            scales.add(scale)
        elif dtype in _FP8:
            scale = _needs(key + _SCALE_INV, key, keys, folder)
            out[key] = Stored("fp8", (key, scale), shape, dtype)
            scales.add(scale)
    for key, (dtype, shape) in keys.items():
        if key not in scales and key not in out and not key.endswith(_PACKED):
            out[key] = Stored("plain", (key,), shape, dtype)
    return {k: out[k] for k in sorted(out, key=_natural)}


def _has_tower(keys: Collection[str], allowed: tuple[str, ...]) -> bool:
    """Whether there is a vision tower and it is not to be carried along unused."""
    tower = "vision_tower."
    return any(key.startswith(tower) for key in keys) and not tower.startswith(allowed or ("\0",))


def _needs(scale: str, key: str, keys: Mapping[str, Any], folder: HfFolder) -> str:
    if scale not in keys:
        raise CheckpointError(f"{folder.file_of(key)}, key {key}: its scales {scale} are missing.")
    return scale


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Order in which layer 10 comes after layer 2."""
    return [(0, int(w)) if w.isdigit() else (1, w) for w in name.split(".")]
