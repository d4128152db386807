"""`moejax export-hf`: a checkpoint becomes a folder that the family's own code loads."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moejax.checkpoint import quant
from moejax.checkpoint.hf_folder import HfWriter
from moejax.checkpoint.hf_import import CARRIED, HF_FOLDER, MANIFEST, OnBytes, size_of
from moejax.checkpoint.key_map import Entry, Index, KeyMap
from moejax.checkpoint.layout import CheckpointError, locate, named_leaves, steps_in
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.safetensors_file import SafetensorsFile
from moejax.checkpoint.streamed import read_carried
from moejax.checkpoint.weights import refuse_adapters
from moejax.config import ModelConfig, RunConfig, build_section
from moejax.models.hf_config import FAMILIES, read_hf_config
from moejax.models.hf_config_write import first_difference, write_hf_config
from moejax.models.parts import model_parts

DTYPES = ("source", "float32", "bfloat16")
EXPERTS = ("source", "float32", "bfloat16", "mxfp4")
_NAMES = {"float32": "F32", "bfloat16": "BF16"}
_NUMPY = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NUMPY["F16"] = np.dtype(np.float16)


class ExportReport(NamedTuple):
    """What an export wrote: tensors of the model, carried ones, bytes."""

    out: pathlib.Path
    model_type: str
    num_tensors: int
    num_carried: int
    total_bytes: int


class _Plan(NamedTuple):
    """How one tensor of the model is written."""

    entry: Entry
    kind: str  # plain, mxfp4, fp8; packed: codes or scales as the tree has them
    dtype: str
    shape: tuple[int, ...]

    def files(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(key, dtype, shape) of what lands in the folder."""
        name, shape = self.entry.name, self.shape
        if self.kind == "mxfp4":
            stem = name.removesuffix(".weight")
            return [
                (f"{stem}.weight_packed", "U8", (*shape[:-1], shape[-1] // 2)),
                (f"{stem}.weight_scale", "U8", (*shape[:-1], shape[-1] // quant.MXFP4_BLOCK)),
            ]
        if self.kind == "fp8":
            grid = tuple(-(-n // quant.FP8_BLOCK) for n in shape)
            return [(name, "F8_E4M3", shape), (f"{name}_scale_inv", "F32", grid)]
        return [(name, self.dtype, shape)]


def export_hf(
    checkpoint: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    dtype: str = "source",
    experts: str = "source",
    max_shard_bytes: int = 5 * 10**9,
    on_bytes: OnBytes | None = None,
) -> ExportReport:
    """Writes the weights of a checkpoint under the names, shapes and types of its family.

    Args:
      checkpoint: a workdir (its newest step), or one step.
      out: a folder that does not exist or is empty.
      dtype: of all but the float32 list. "source": as the imported folder had it; bfloat16 where
        the weights were never imported.
      experts: the same for the routed experts, or "mxfp4".
      max_shard_bytes: limit of a file.
      on_bytes: called with bytes done, bytes in all and the name just written.
    Raises:
      CheckpointError: no checkpoint; `out` in the way. Nothing half-written stays.
      ConfigError: a model that no published format can hold.
    """
    for name, value, allowed in (("dtype", dtype, DTYPES), ("experts", experts, EXPERTS)):
        if value not in allowed:
            raise CheckpointError(f"--{name}={value} is not one of {', '.join(allowed)}.")
    directory, number = locate(checkpoint)
    step_dir = directory / str(steps_in(directory)[-1] if number is None else number)
    reader, side = LeafReader(step_dir), directory.parent / HF_FOLDER
    run = build_section(RunConfig, reader.meta["config"])
    refuse_adapters(checkpoint, run.lora.rank)
    cfg = run.model
    raw, manifest = _origin(side, cfg)
    family = FAMILIES[raw["model_type"]]
    asked = dtype if experts == "source" else experts
    unpacks = cfg.moe.expert_format == "mxfp4" and asked not in ("source", "mxfp4")
    stays_packed = cfg.moe.expert_format == "mxfp4" and not unpacks
    if (asked == "mxfp4" or stays_packed) and raw["model_type"] != "kimi_k3":
        raise CheckpointError(
            f"--experts=mxfp4: no published {raw['model_type']} checkpoint stores experts so. "
            "Export with --experts=bfloat16."
        )
    parts = model_parts(cfg)
    plain = cfg.replace(moe=cfg.moe.replace(expert_format="plain"))
    keys = KeyMap(model_parts(plain) if unpacks else parts, family.spelling)
    carried = read_carried(step_dir) or _carried_of(side)
    plans = [
        _plan(entry, manifest, dtype, experts)
        for entry in keys.entries.values()
        if not (manifest and entry.optional and entry.name not in manifest)
    ]
    extra = _extra_keys(carried, plans)
    files = [file for plan in plans for file in plan.files()] + extra
    total, done = sum(size_of(kind, shape) for _, kind, shape in files), 0
    item_of = {leaf: f"params/{leaf}" for leaf in named_leaves(parts.params)}
    item_of |= {leaf: f"balance/{leaf}" for leaf in named_leaves(parts.balance)}

    def read(leaf: str, index: Index) -> np.ndarray:
        values = reader.read(item_of[leaf], index)
        if not (unpacks and f"{leaf}_scales" in item_of):
            return values
        scales = reader.read(item_of[f"{leaf}_scales"], index)
        return quant.mxfp4_decode(values.T, scales.T).T  # one expert's [in, out]

    with HfWriter(out, files, max_shard_bytes) as writer:
        for plan in plans:
            array = keys.to_theirs(plan.entry.name, read)
            for key, encoded in _encoded(plan, array, carried):
                writer.add(key, encoded)
            done += sum(size_of(kind, shape) for _, kind, shape in plan.files())
            if on_bytes:
                on_bytes(done, total, plan.entry.name)
        for key, kind, shape in extra:
            assert carried is not None
            writer.add(key, carried.raw(key))
            done += size_of(kind, shape)
            if on_bytes:
                on_bytes(done, total, key)
        _write_side_files(writer, side, raw, plans)
    model_type = str(raw["model_type"])
    return ExportReport(writer.out, model_type, len(plans), len(extra), total)


def _origin(side: pathlib.Path, cfg: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and manifest of the folder that the weights came from, or a config of our own."""
    if not (side / MANIFEST).is_file():
        return write_hf_config(cfg), {}
    raw = json.loads((side / "config.json").read_text(encoding="utf-8"))
    manifest = json.loads((side / MANIFEST).read_text(encoding="utf-8"))["tensors"]
    _, source = read_hf_config(raw)
    if first_difference(cfg, source):
        return write_hf_config(cfg), {}  # trained on as another model
    return raw, manifest


def _carried_of(side: pathlib.Path) -> SafetensorsFile | None:
    path = side / CARRIED
    return SafetensorsFile(path) if path.is_file() else None


def _plan(entry: Entry, manifest: Mapping[str, Any], dtype: str, experts: str) -> _Plan:
    if entry.name.endswith(("_packed", "_scale")):
        return _Plan(entry, "packed", "U8", entry.shape)
    asked = experts if ".experts." in entry.name and experts != "source" else dtype
    stored = manifest.get(entry.name)
    shape = tuple(stored[2]) if stored else entry.shape
    if asked == "mxfp4":
        if shape[-1] % quant.MXFP4_BLOCK:
            raise CheckpointError(
                f"{entry.name} is {shape[-1]} wide, which blocks of {quant.MXFP4_BLOCK} do not "
                "divide: export with --experts=bfloat16."
            )
        return _Plan(entry, "mxfp4", "U8", shape)
    if asked == "source" and stored:
        return _Plan(entry, stored[0], stored[1], shape)
    plain = "F32" if entry.float32 else _NAMES.get(asked, "BF16")
    return _Plan(entry, "plain", plain, shape)


def _encoded(
    plan: _Plan, array: np.ndarray, carried: SafetensorsFile | None
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays to write; with the scales that came along, untouched weights give their codes."""
    files = plan.files()
    scales = None
    if plan.kind == "packed":
        yield files[0][0], array
        return
    if carried is not None and files[-1][0] in carried.tensors and plan.kind != "plain":
        scales = carried.read(files[-1][0])
    if plan.kind == "mxfp4":
        coded = quant.mxfp4_encode(*_with_scales(plan.kind, array, scales))
    elif plan.kind == "fp8":
        coded = quant.fp8_block_encode(*_with_scales(plan.kind, array, scales))
    else:
        if plan.entry.form.rule.padded:
            array = _padded(plan, array, carried)
        yield files[0][0], array.astype(_NUMPY[plan.dtype], copy=False)
        return
    for (key, _, _), value in zip(files, coded, strict=True):
        yield key, value


def _with_scales(
    kind: str, array: np.ndarray, scales: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 values, and the scales they came with except where training outgrew them."""
    values = np.asarray(array, np.float32)
    if scales is None:
        return values, None
    if kind == "mxfp4":
        blocks = np.abs(values).reshape(*scales.shape, quant.MXFP4_BLOCK).max(-1)
        largest = np.ldexp(np.float32(6), scales.astype(np.int32) - 127)
        return values, np.where(blocks > largest, quant.mxfp4_scales(values), scales)
    grown = quant.fp8_block_encode(values)[1]  # largest / 448 of each block
    # fp8 products rounded to bfloat16 may lie a little above the largest code.
    return values, np.where(grown > scales * (1 + 2.0**-7), grown, scales)


def _padded(plan: _Plan, array: np.ndarray, carried: SafetensorsFile | None) -> np.ndarray:
    """A padded vector in its stored shape: what came along behind the live entries, else zeros."""
    live = array.reshape(-1)[: int(np.prod(plan.entry.form.split))]
    out = np.zeros(int(np.prod(plan.shape)), array.dtype)
    if carried is not None and plan.entry.name in carried.tensors:
        out[:] = carried.read(plan.entry.name).reshape(-1).astype(array.dtype)
    out[: live.size] = live
    return out.reshape(plan.shape)


def _extra_keys(
    carried: SafetensorsFile | None, plans: list[_Plan]
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Carried tensors that belong to no tensor of the model."""
    if carried is None:
        return []
    own = {plan.entry.name for plan in plans}
    own |= {name + "_scale_inv" for name in own} | {name + "_scale" for name in own}
    return [(k, i.dtype, i.shape) for k, i in carried.tensors.items() if k not in own]


def _write_side_files(
    writer: HfWriter, side: pathlib.Path, raw: Mapping[str, Any], plans: list[_Plan]
) -> None:
    kinds = {"mxfp4" if plan.kind == "packed" else plan.kind for plan in plans}
    original = side / "config.json"
    config = _with_quantization(
        raw, kinds, {plan.dtype for plan in plans if not plan.entry.float32}
    )
    if original.is_file() and config == raw:
        shutil.copyfile(original, writer.folder / "config.json")
    else:
        writer.write_json("config.json", config)
    if side.is_dir():
        for path in side.iterdir():
            if path.name not in ("config.json", MANIFEST) and path.suffix != ".safetensors":
                shutil.copyfile(path, writer.folder / path.name)


MXFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                        "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"},
            "input_activations": None,
        }
    },
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\..*", "re:.*routed_expert_.*",
        "lm_head",
    ],
}  # fmt: skip


def _with_quantization(raw: Mapping[str, Any], kinds: set[str], dtypes: set[str]) -> dict[str, Any]:
    """config.json that says what the weights are: quantised as they are written, or not at all."""
    config = dict(raw)
    text = dict(config["text_config"]) if "text_config" in config else config
    place = text if "text_config" in config else config
    had: dict[str, Any] = next(
        (c["quantization_config"] for c in (place, config) if "quantization_config" in c), {}
    )
    method = "fp8" if had.get("quant_method") == "fp8" else "mxfp4"
    if kinds == {"plain"}:
        for section in (place, config):
            section.pop("quantization_config", None)
    elif "mxfp4" in kinds and (not had or method != "mxfp4"):
        place["quantization_config"] = MXFP4_CONFIG
    if "text_config" in config:
        config["text_config"] = text
    for key in ("dtype", "torch_dtype"):
        if key in config and "U8" not in dtypes and len(dtypes) == 1:
            config[key] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(
                next(iter(dtypes)), config[key]
            )
    return config
