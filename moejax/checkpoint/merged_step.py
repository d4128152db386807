"""The step that a merge writes over a checkpoint: some matrices changed, all else copied."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moejax.checkpoint import layout, quant
from moejax.checkpoint.hf_import import HF_FOLDER, OnBytes
from moejax.checkpoint.key_map import Index, KeyMap
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.peft_fold import Change
from moejax.checkpoint.piecewise import chunk_shape
from moejax.checkpoint.streamed import StreamedCheckpoint, read_carried
from moejax.config import RunConfig, as_dict
from moejax.config.load import RESOLVED_FILE

_BF16 = np.dtype(ml_dtypes.bfloat16)
_TOKENIZERS = ("tokenizer*.json", "tiktoken.model", "special_tokens_map.json", "chat_template*")

Read = Callable[[str, Index], np.ndarray]


def with_plain_experts(cfg: RunConfig) -> RunConfig:
    """The config of a run whose routed experts are not packed."""
    moe = dataclasses.replace(cfg.model.moe, expert_format="plain")
    return cfg.replace(model=cfg.model.replace(moe=moe))


def write_merged(
    reader: LeafReader, cfg: RunConfig, key_map: KeyMap, changes: Mapping[str, Change],
    workdir: pathlib.Path, on_bytes: OnBytes | None,
) -> None:  # fmt: skip
    """Writes step 0 of `workdir`, piece by piece.

    Args:
      reader: the base. Where it has packed experts and `cfg` plain ones, these are unpacked, to
        bfloat16, which holds every MXFP4 value.
      cfg: of the merged model.
      key_map: its stored tensors.
      changes: stored tensor -> what becomes of it, float32 to float32.
    """
    leaves = _leaves(reader, key_map)
    full = {name.partition("/")[2]: name for name in leaves}
    touched = {leaf for name in changes for leaf, _ in key_map.entries[name].places}
    saved = reader.meta["leaves"]
    touched |= {n for n, name in full.items() if np.dtype(saved[name][1]) != leaves[name].dtype}
    infos = {f"params/{n}": x for n, x in layout.named_leaves(key_map.parts.infos).items()}
    carried = read_carried(reader.step_dir)
    plan = [] if carried is None else [(k, i.dtype, i.shape) for k, i in carried.tensors.items()]
    total, done = sum(x.size * x.dtype.itemsize for x in leaves.values()), 0
    with StreamedCheckpoint(
        workdir, layout.nest(leaves), config=as_dict(cfg), infos=key_map.parts.infos, carried=plan
    ) as step:
        for name, leaf in leaves.items():
            if name.partition("/")[2] not in touched:
                chunk = chunk_shape(leaf.shape, leaf.dtype.itemsize, infos.get(name))
                for part in _chunks(leaf.shape, chunk):
                    step.write(name, part, reader.read(name, part))
                done += leaf.size * leaf.dtype.itemsize
                if on_bytes:
                    on_bytes(done, total, name)
        for name, entry in key_map.entries.items():
            if touched.isdisjoint(leaf for leaf, _ in entry.places):
                continue
            before = key_map.to_theirs(name, _reading(reader, full, leaves))
            after = before
            if name in changes:
                after = changes[name](before.astype(np.float32)).astype(before.dtype)
            for inner, index, array in key_map.to_ours(name, after):
                step.write(full[inner], index, array)
            done += after.nbytes
            if on_bytes:
                on_bytes(done, total, name)
        for key, _, _ in plan:
            assert carried is not None
            step.carry(key, carried.raw(key))


def _leaves(reader: LeafReader, key_map: KeyMap) -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf of the merged step: the base's, in its types; unpacked experts in bfloat16."""
    out = {}
    for top, tree in (("params", key_map.parts.params), ("balance", key_map.parts.balance)):
        for inner, leaf in layout.named_leaves(tree).items():
            saved = np.dtype(reader.meta["leaves"][f"{top}/{inner}"][1])
            unpacked = saved == np.uint8 and leaf.dtype != np.uint8
            dtype = _BF16 if unpacked else saved
            out[f"{top}/{inner}"] = jax.ShapeDtypeStruct(leaf.shape, dtype)
    return out


def _reading(
    reader: LeafReader, full: Mapping[str, str], leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> Read:
    def read(leaf: str, index: Index) -> np.ndarray:
        name = full[leaf]
        values = reader.read(name, index)
        if values.dtype == leaves[name].dtype:
            return values
        scales = reader.read(f"{name}_scales", index)  # one expert's, [in, out]
        return quant.mxfp4_decode(values.T, scales.T, dtype=_BF16).T

    return read


def _chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Indices of the pieces of a leaf that are one file each."""
    starts = [range(0, n, c) for n, c in zip(shape, chunk, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(at, min(at + c, n)) for at, c, n in zip(corner, chunk, shape, strict=True)
        )


def copy_side_files(
    workdir: pathlib.Path, partial: pathlib.Path, out: pathlib.Path, cfg: RunConfig
) -> None:
    """What export, generation and training find beside the weights, tokenizer included."""
    if (workdir / HF_FOLDER).is_dir():
        shutil.copytree(workdir / HF_FOLDER, partial / HF_FOLDER)
    for pattern in _TOKENIZERS:
        for path in workdir.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    raw: dict[str, Any] = as_dict(cfg)
    if raw["data"]["tokenizer"] in (HF_FOLDER, str(workdir / HF_FOLDER)):
        raw["data"]["tokenizer"] = str(out / HF_FOLDER)
    text = json.dumps(raw, indent=2) + "\n"
    (partial / RESOLVED_FILE).write_text(text, encoding="utf-8")
