"""`moejax export-lora`: the adapters of a run in PEFT's form."""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from moejax.checkpoint.hf_import import HF_FOLDER
from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.peft_run import RunAdapters
from moejax.checkpoint.peft_write import AdapterFile, write_peft
from moejax.checkpoint.weights import is_hf_folder


class LoraExport(NamedTuple):
    """What was written, the names it bears, and what an adapter cannot hold of the run."""

    file: AdapterFile
    model_type: str
    names: str
    notes: list[str]


def export_lora(
    run: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    names: str = "transformers",
    dtype: str = "float32",
    base: str | None = None,
) -> LoraExport:
    """Writes adapter_config.json and adapter_model.safetensors.

    Args:
      run: a LoRA run's workdir (its newest checkpoint), or one step.
      out: a folder that does not exist or is empty.
      names: "transformers" or "checkpoint", see `write_peft`.
      dtype: "float32" or "bfloat16".
      base: `base_model_name_or_path`; None: the folder or name that the run's base came from.
    Raises:
      CheckpointError: no adapters, `out` in the way, or the run trained other parameters as well.
    """
    trained = RunAdapters(run)
    other = next((name for name in trained.others if name.startswith("params/")), None)
    if other is not None:
        shown = other.partition("/")[2].replace("/", ".")
        raise CheckpointError(
            f"{trained.step_dir} has trained {shown} besides adapters, which an adapter file "
            "cannot hold. `moejax merge-lora` puts all of it into the base."
        )
    shapes, idle = {}, 0
    for name in trained.maps():
        low = trained.read(name)
        if low.rank:
            shapes[name] = (low.rank, low.scale)
        else:
            idle += 1
    cfg = trained.cfg.lora
    file = write_peft(
        out, trained.names, shapes, trained.read, spelling=names, dtype=dtype, rslora=cfg.rslora,
        dropout=cfg.dropout, base=base or base_name(trained),
    )  # fmt: skip
    notes = [f"{idle} adapters are all zero and left out"] if idle else []
    spelled = names if trained.names.memory is not None else "checkpoint"
    return LoraExport(file, trained.names.model_type, spelled, notes)


def base_name(trained: RunAdapters) -> str | None:
    """Where PEFT finds the base: the run's Hugging Face folder, or the name that it gave itself."""
    init_from = pathlib.Path(trained.cfg.init_from).expanduser()
    if trained.cfg.init_from and is_hf_folder(init_from):
        return str(init_from)
    path = trained.workdir / HF_FOLDER / "config.json"
    if not path.is_file():
        return None
    name = json.loads(path.read_text(encoding="utf-8")).get("_name_or_path")
    return name if isinstance(name, str) and name else None
