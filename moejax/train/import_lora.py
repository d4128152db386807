"""`moejax import-lora`: an adapter in PEFT's form becomes a LoRA run that has made no step."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from moejax.checkpoint import Checkpoints
from moejax.checkpoint.base import fingerprint
from moejax.checkpoint.hf_import import HF_FOLDER
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import (
    locate,
    named_leaves,
    nest,
)
from moejax.checkpoint.partial import free_folder, written_whole
from moejax.checkpoint.peft_import import lora_config, tree_leaves
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_read import PeftFolder
from moejax.checkpoint.peft_run import model_type_of, names_of
from moejax.checkpoint.reader import read_config
from moejax.checkpoint.weights import Weights, is_hf_folder, open_weights, refuse_adapters
from moejax.config import DataConfig, RunConfig, as_dict
from moejax.config.load import RESOLVED_FILE, as_run_config
from moejax.lora import write_adapters
from moejax.models.parts import model_parts
from moejax.partitioning import make_mesh
from moejax.train.state import (
    Program,
    TrainState,
    as_tree,
    build_program,
    frozen_leaves,
)

_SMALL = 1 << 20  # values of a leaf of the base that is read to recognise it
_RATE = 1e-3
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model")


class LoraImport(NamedTuple):
    """What an import did.

    Attributes:
      checkpoint: folder of the step.
      num_adapters: adapters of the file.
      num_values: numbers in the run's adapters, zeros that fill ranks included.
      notes: what is other than in the file, in words.
    """

    checkpoint: pathlib.Path
    num_adapters: int
    num_values: int
    notes: list[str]


def import_lora(
    adapter: str | pathlib.Path, base: str | pathlib.Path, out: str | pathlib.Path
) -> LoraImport:
    """Writes `out`, a workdir of a LoRA run at step 0 with the adapter's values.

    `moejax train` and `finetune` go on from there, `generate` and `eval` read it; each reads the
    base from where it is. Of the base only small leaves are read here.

    Args:
      adapter: folder of adapter_config.json and adapter_model.safetensors.
      base: a workdir, a step, or a Hugging Face folder.
      out: a folder that does not exist or is empty.
    Raises:
      CheckpointError: something is missing or in the way, or the adapter is of another model.
        Nothing half-written stays.
    """
    base, out = pathlib.Path(base).expanduser().absolute(), free_folder(out)
    cfg, names = _base(base)
    folder = PeftFolder(adapter, names)
    cfg = cfg.replace(lora=lora_config(folder, model_parts(cfg.model)), init_from=str(base))
    program = build_program(cfg, make_mesh(cfg.mesh))
    leaves = tree_leaves(folder, cfg)
    weights = open_weights(base)
    with written_whole(out) as partial:
        weights.keep_for_export(partial)
        _copy_tokenizer(base, partial)
        _save(program, leaves, weights, partial)
        _write_files(program, partial, out)
    values = sum(leaf.size for leaf in leaves.values())
    notes = _notes(folder, program)
    return LoraImport(out / "checkpoints" / "0", len(folder.maps()), values, notes)


def _base(base: pathlib.Path) -> tuple[RunConfig, PeftNames]:
    """A run's config for the base's model, and what its family calls the maps."""
    if is_hf_folder(base):
        source = HfSource(base)
        model_type = str(source.raw_config["model_type"])
        tokenizer = HF_FOLDER if source.folder.tokenizer_files() else "bpe"
        cfg = RunConfig(model=source.cfg, data=DataConfig(tokenizer=tokenizer))
        names = PeftNames(source.parts, source.family.spelling, model_type)
    else:
        cfg = as_run_config(read_config(base))
        refuse_adapters(base, cfg.lora.rank)
        directory, _ = locate(base)
        names = names_of(cfg.model, model_type_of(directory.parent, cfg.model))
    # As fine-tuning sets it; AdamW's state does not depend on what the base was trained with.
    optim = cfg.optim.replace(
        name="adamw", lr=_RATE, adam_lr=_RATE, weight_decay=0.0, ema_decay=0.0, qk_clip=0.0
    )
    return cfg.replace(optim=optim), names


def _save(
    program: Program, leaves: dict[str, np.ndarray], weights: Weights, workdir: pathlib.Path
) -> None:
    """The step: adapters, fresh optimizer state, the base's balancing state, marks of the base."""
    params = nest({name.partition("/")[2]: jnp.asarray(x) for name, x in leaves.items()})
    opt_state = jax.jit(program.optimizer.init)(params)
    here = SingleDeviceSharding(jax.local_devices()[0])

    def wanted(named: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for n, x in named.items()}

    balance = named_leaves({"balance": program.abstract.balance})
    read = weights.read(wanted(balance)) if balance else {}
    state = TrainState(params, opt_state, nest(read).get("balance", {}), jnp.zeros((), jnp.int32))
    frozen = frozen_leaves(program, program.abstract.params)
    small = {n: x for n, x in frozen.items() if np.prod(x.shape) <= _SMALL}
    marks = fingerprint(weights.read(wanted(small)))
    checkpoints = Checkpoints(workdir)
    tree = as_tree(state, program.cfg.seed)
    try:
        checkpoints.save(0, tree, position={"base": marks}, config=as_dict(program.cfg))
    finally:
        checkpoints.close()


def _write_files(program: Program, partial: pathlib.Path, out: pathlib.Path) -> None:
    """config.json, so that `--config=OUT` trains this run, and the list of adapters."""
    cfg = program.cfg
    if cfg.data.tokenizer == HF_FOLDER:
        cfg = cfg.replace(data=cfg.data.replace(tokenizer=str(out / HF_FOLDER)))
    text = json.dumps(as_dict(cfg), indent=2) + "\n"
    (partial / RESOLVED_FILE).write_text(text, encoding="utf-8")
    assert program.selection is not None
    write_adapters(partial, program.selection.targets, shared_a=cfg.lora.shared_a)


def _copy_tokenizer(base: pathlib.Path, partial: pathlib.Path) -> None:
    """The tokenizer that a run has learned lies in its folder."""
    if is_hf_folder(base):
        return
    directory, _ = locate(base)
    for name in _TOKENIZER_FILES:
        if (directory.parent / name).is_file():
            shutil.copyfile(directory.parent / name, partial / name)


def _notes(folder: PeftFolder, program: Program) -> list[str]:
    notes = []
    cfg = program.cfg.lora
    if folder.config.dropout and not cfg.dropout:
        notes.append(
            f"lora_dropout={folder.config.dropout} is not kept: there are adapters on maps whose "
            "inputs cannot be dropped"
        )
    assert program.selection is not None
    places = {(m.stack, m.run, m.place, m.path): name for name, m in folder.names.maps.items()}
    maps = ((t.rank, t.map) for t in program.selection.targets)
    filled = [
        folder.read(places[(m.stack, m.run, m.place, m.path)]).rank < rank for rank, m in maps
    ]
    if any(filled):
        notes.append(
            f"{sum(filled)} adapters are filled with zeros to the rank of other layers in a scan"
        )
    return notes
