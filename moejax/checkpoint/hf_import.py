"""`moejax import-hf`: a Hugging Face folder becomes a moejax checkpoint, one tensor in memory."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from moejax.checkpoint import safetensors_file
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import CheckpointError, named_leaves
from moejax.checkpoint.partial import free_folder, written_whole
from moejax.checkpoint.streamed import StreamedCheckpoint
from moejax.config import DataConfig, RunConfig, as_dict
from moejax.typing import PyTree

HF_FOLDER = "hf"  # in a workdir: what export needs beside the weights
MANIFEST = "manifest.json"
CARRIED = "carried.safetensors"
DTYPES: Mapping[str, Any] = {
    "auto": None, "float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
EXPERTS = ("unpacked", "packed")
_SIDE_FILES = ("config.json", "generation_config.json")

OnBytes = Callable[[int, int, str], Any]
# Stored tensor -> what it is to become, float32 to float32, in its stored shape.
Changes = Mapping[str, Callable[[np.ndarray], np.ndarray]]


class ImportReport(NamedTuple):
    """What an import did.

    Attributes:
      checkpoint: the folder of the step.
      model_type: family of the source.
      num_tensors: stored tensors of the model that were read; num_carried: those kept as they are.
      absent: tensors that the folder may lack and does; they are zero.
      source_bytes: bytes read; seconds: wall time.
      dtypes: leaf type -> number of values.
    """

    checkpoint: pathlib.Path
    model_type: str
    num_tensors: int
    num_carried: int
    absent: list[str]
    source_bytes: int
    seconds: float
    dtypes: dict[str, int]


def import_hf(
    src: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    dtype: str = "auto",
    experts: str = "unpacked",
    allow: Collection[str] = (),
    changes: Changes | None = None,
    data: DataConfig | None = None,
    on_bytes: OnBytes | None = None,
) -> ImportReport:
    """Writes `out`, a workdir whose step 0 holds the weights of `src`.

    No leaf is ever whole in memory: tensors are read, turned and written one by one.

    Args:
      src: folder with config.json and safetensors.
      out: a folder that does not exist or is empty.
      dtype: of the leaves. "auto": as stored, codes in bfloat16 (exact for MXFP4, rounded once for
        fp8); or "float32", "bfloat16". Parameters of the float32 list stay float32 in any case.
      experts: "packed" keeps the bytes of routed experts in MXFP4, for a model with
        `model.moe.expert_format="mxfp4"`.
      allow: names, or beginnings of names, of tensors that no part of the model answers to; they
        are carried along.
      changes: tensors that are changed on the way; the result is rounded once.
      data: what the config says of data, without the tokenizer; None: its defaults.
      on_bytes: called with bytes done, bytes in all and the name just read.
    Raises:
      CheckpointError: the first thing that is wrong with `src`, or `out` is in the way. Nothing
        half-written stays.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}.")
    if experts not in EXPERTS:
        raise CheckpointError(f"--experts={experts} is not one of {', '.join(EXPERTS)}.")
    began = time.perf_counter()
    source = HfSource(src, allow_unexpected=allow, packed=experts == "packed")
    out = free_folder(out)
    leaf_dtypes = _leaf_dtypes(source, dtype)
    with written_whole(out) as partial:
        write_side_files(source, partial / HF_FOLDER)
        config = RunConfig(model=source.cfg, data=data or DataConfig())
        _write_step(source, partial, config, leaf_dtypes, changes or {}, on_bytes)
        _write_config(source, partial, config, out)
    counts: dict[str, int] = {}
    for leaf, kind in leaf_dtypes.items():
        size = math.prod(source.map.leaves[leaf].shape)
        counts[kind.name] = counts.get(kind.name, 0) + size
    return ImportReport(
        out / "checkpoints" / "0", str(source.raw_config["model_type"]), len(source.tensors),
        len(source.carried), source.absent, source.folder.total_bytes,
        time.perf_counter() - began, counts,
    )  # fmt: skip


def _leaf_dtypes(source: HfSource, dtype: str) -> dict[str, np.dtype]:
    asked = DTYPES[dtype]
    kept = {leaf for e in source.map.entries.values() if e.float32 for leaf, _ in e.places}
    exact = {leaf: source.leaf_dtype(leaf) for leaf in source.map.leaves}
    bits = {leaf for leaf, kind in exact.items() if kind == np.uint8}
    return {
        leaf: np.dtype(np.float32) if leaf in kept else kind if leaf in bits else asked or kind
        for leaf, kind in exact.items()
    }


def _write_step(
    source: HfSource,
    workdir: pathlib.Path,
    config: RunConfig,
    leaf_dtypes: Mapping[str, np.dtype],
    changes: Changes,
    on_bytes: OnBytes | None,
) -> None:
    parts = source.parts
    abstract = {
        "params": _typed(parts.params, leaf_dtypes),
        "balance": _typed(parts.balance, leaf_dtypes),
    }
    item_of = {leaf: "params/" for leaf in named_leaves(parts.params)}
    item_of |= {leaf: "balance/" for leaf in named_leaves(parts.balance)}
    keys = source.folder.keys()
    carried = carried_plan(source)
    config = config.replace(data=config.data.replace(tokenizer=HF_FOLDER))
    done, total = 0, source.folder.total_bytes
    with StreamedCheckpoint(
        workdir, abstract, config=as_dict(config), infos=parts.infos, carried=carried
    ) as step:
        for name, tensor in source.tensors.items():
            wide = _widest(source, name, leaf_dtypes)
            pieces = source.pieces(name, wide)
            if name in changes:
                changed = changes[name](source.read(name, np.float32))
                pieces = source.map.to_ours(name, changed)
            for leaf, index, array in pieces:
                step.write(item_of[leaf] + leaf, index, array.astype(leaf_dtypes[leaf], copy=False))
            done += sum(size_of(*keys[key]) for key in tensor.keys)
            if on_bytes:
                on_bytes(done, total, name)
        for name in source.absent:
            for leaf, index in source.map.entries[name].places:
                shape = source.map.leaves[leaf].shape
                room = [n for n, i in zip(shape, index, strict=True) if isinstance(i, slice)]
                step.write(item_of[leaf] + leaf, index, np.zeros(room, leaf_dtypes[leaf]))
        for key, _, _ in carried:
            step.carry(key, source.folder.raw(key))
            if key in source.carried:
                done += size_of(*keys[key])
                if on_bytes:
                    on_bytes(done, total, key)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a stored tensor."""
    return math.prod(shape) * safetensors_file.DTYPES[dtype].itemsize


def _write_config(
    source: HfSource, partial: pathlib.Path, config: RunConfig, out: pathlib.Path
) -> None:
    """config.json, so that `--config=OUT` trains this model; the tokenizer is the folder's own."""
    tokenizer = str(out / HF_FOLDER) if source.folder.tokenizer_files() else "bpe"
    config = config.replace(data=config.data.replace(tokenizer=tokenizer))
    text = json.dumps(as_dict(config), indent=2) + "\n"
    (partial / "config.json").write_text(text, encoding="utf-8")


def carried_plan(source: HfSource) -> list[tuple[str, str, tuple[int, ...]]]:
    """(key, dtype, shape) of all that an export needs and the weights do not hold."""
    keys = source.folder.keys()
    kept = dict.fromkeys([*source.carried, *_kept_for_export(source)])
    return [(key, *keys[key]) for key in kept]


def carry_to(source: HfSource, path: pathlib.Path) -> None:
    """Writes the same tensors into one file; none when there are none."""
    plan = carried_plan(source)
    if plan:
        writer = safetensors_file.SafetensorsWriter(path, plan)
        for key, _, _ in plan:
            writer.add(key, source.folder.raw(key))
        writer.close()


def _widest(source: HfSource, name: str, leaf_dtypes: Mapping[str, np.dtype]) -> np.dtype:
    """float32 as soon as one of the leaves that a tensor feeds is."""
    leaves = {leaf_dtypes[leaf] for leaf, _ in source.map.entries[name].places}
    return np.dtype(np.float32) if len(leaves) > 1 else leaves.pop()


def _typed(tree: PyTree, leaf_dtypes: Mapping[str, np.dtype]) -> PyTree:
    named = named_leaves(tree)
    leaves = [jax.ShapeDtypeStruct(x.shape, leaf_dtypes[name]) for name, x in named.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _kept_for_export(source: HfSource) -> list[str]:
    """Stored tensors of the model that its weights alone do not give back: scales, odd padding."""
    keys: list[str] = []
    for name, tensor in source.tensors.items():
        keys += tensor.keys[1:]
        live = math.prod(source.map.entries[name].form.split)
        if math.prod(tensor.shape) > live and source.folder.read(name).reshape(-1)[live:].any():
            keys.append(name)
    return keys


def write_side_files(source: HfSource, folder: pathlib.Path) -> None:
    """config.json, tokenizer, and how every tensor was stored."""
    folder.mkdir()
    for name in _SIDE_FILES:
        if (source.folder.path / name).is_file():
            shutil.copyfile(source.folder.path / name, folder / name)
    for path in source.folder.tokenizer_files():
        shutil.copyfile(path, folder / path.name)
    tensors = {
        name: [s.kind, s.dtype, list(s.shape)]
        for name, s in source.stored.items()
        if not set(s.keys) & set(source.carried)
    }
    (folder / MANIFEST).write_text(json.dumps({"tensors": tensors}), encoding="utf-8")
