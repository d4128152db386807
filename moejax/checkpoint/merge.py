"""`moejax merge-lora`: adapters folded into their base, one stored matrix in memory at a time.

``W + scale B A`` in float32, rounded once to the base's type. What has no adapter stays as it is,
bit for bit. Adapters that learned over a base in 8 bits (`lora.base_format`) are folded into the
plain one that it was made from.
"""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from moejax.checkpoint import layout
from moejax.checkpoint.base import check_base, fingerprint
from moejax.checkpoint.hf_import import HF_FOLDER, MANIFEST, OnBytes, import_hf
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.key_map import KeyMap
from moejax.checkpoint.layout import CheckpointError, locate, steps_in
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.merged_step import copy_side_files, with_plain_experts, write_merged
from moejax.checkpoint.partial import free_folder, written_whole
from moejax.checkpoint.peft_fold import Adapters, changes_of, folded_names
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_read import PeftFolder
from moejax.checkpoint.peft_run import RunAdapters, model_type_of, names_of
from moejax.checkpoint.quantised_weights import stored_as
from moejax.checkpoint.weights import check_base_is_there, is_hf_folder, refuse_adapters
from moejax.config import RunConfig, build_section
from moejax.layers.quantised import is_scale
from moejax.models.hf_config import FAMILIES
from moejax.models.parts import model_parts

_SMALL = 1 << 20  # values of a leaf that is read whole to be recognised


class MergeReport(NamedTuple):
    """What a merge did.

    Attributes:
      checkpoint: folder of the step.
      num_adapters: adapters that were folded in.
      num_changed: stored matrices that they changed (experts one by one).
      num_quantised: how many of these the published format of the base has in fewer bits, to which
        an export in source types would round them.
      seconds: wall time.
    """

    checkpoint: pathlib.Path
    num_adapters: int
    num_changed: int
    num_quantised: int
    seconds: float


def merge_lora(
    out: str | pathlib.Path,
    *,
    run: str | pathlib.Path | None = None,
    adapter: str | pathlib.Path | None = None,
    base: str | pathlib.Path | None = None,
    on_bytes: OnBytes | None = None,
) -> MergeReport:
    """Writes `out`, a workdir whose step 0 holds the merged weights, as an import does.

    Of a run its `data` goes along, so that both are evaluated on the same text in the same rows;
    the tokenizer is the base's.

    Args:
      out: a folder that does not exist or is empty.
      run: a LoRA run's workdir, or one step of it.
      adapter: in place of it a folder in PEFT's form.
      base: a workdir, a step, or a Hugging Face folder; of a run, its `init_from` by default.
      on_bytes: called with bytes done, bytes in all and the name just written.
    Raises:
      CheckpointError: something is missing or in the way, the adapter is of another model, or the
        run had another base. Nothing half-written stays.
    """
    began = time.perf_counter()
    if (run is None) == (adapter is None):
        raise CheckpointError("give either a LoRA run or an adapter in PEFT's form.")
    trained = RunAdapters(run) if run is not None else None
    base = base or (trained.cfg.init_from if trained else "")
    if not base:
        raise CheckpointError(
            "no base: name the model that the adapter was trained on by --base "
            "(a checkpoint, or a Hugging Face folder)."
        )
    if trained and base == trained.cfg.init_from:
        check_base_is_there(trained.cfg.init_from)
    base, out = pathlib.Path(base).expanduser().absolute(), free_folder(out)
    write = _over_folder if is_hf_folder(base) else _over_checkpoint
    adapters, changed, quantised = write(base, out, trained, adapter, on_bytes)
    seconds = time.perf_counter() - began
    return MergeReport(out / layout.SUBDIR / "0", adapters, changed, quantised, seconds)


def _over_folder(
    base: pathlib.Path, out: pathlib.Path, trained: RunAdapters | None, adapter: Any, on_bytes: Any
) -> tuple[int, int, int]:
    """A base in a published format: its import, with some tensors changed on the way."""
    packed = trained is not None and _is_packed(trained.cfg) and not _on_experts(trained)
    source = HfSource(base, packed=packed)
    names = PeftNames(source.parts, source.family.spelling, str(source.raw_config["model_type"]))
    adapters = _adapters(trained, adapter, names)
    _check_base(trained, base, lambda leaf: _whole(source, leaf))
    changes = changes_of(adapters, source.map, trained)
    import_hf(
        base, out, experts="packed" if packed else "unpacked", changes=changes, on_bytes=on_bytes,
        data=trained.cfg.data if trained else None,
    )  # fmt: skip
    folded = folded_names(adapters)
    return len(adapters.maps()), len(folded), sum(source.tensors[n].kind != "plain" for n in folded)


def _over_checkpoint(
    base: pathlib.Path, out: pathlib.Path, trained: RunAdapters | None, adapter: Any, on_bytes: Any
) -> tuple[int, int, int]:
    """A base that is a checkpoint of ours: leaf by leaf, those with adapters matrix by matrix."""
    directory, step = locate(base)
    reader = LeafReader(directory / str(steps_in(directory)[-1] if step is None else step))
    cfg = build_section(RunConfig, reader.meta["config"])
    refuse_adapters(base, cfg.lora.rank)
    model_type = model_type_of(directory.parent, cfg.model)
    adapters = _adapters(trained, adapter, names_of(cfg.model, model_type))
    _check_base(trained, base, lambda leaf: reader.read(f"params/{leaf}"))
    if _is_packed(cfg) and _on_experts(adapters):
        cfg = with_plain_experts(cfg)
    if trained:
        own = {"tokenizer": cfg.data.tokenizer, "bpe_vocab_size": cfg.data.bpe_vocab_size}
        cfg = cfg.replace(data=trained.cfg.data.replace(**own))
    key_map = KeyMap(model_parts(cfg.model), FAMILIES[model_type].spelling)
    changes = changes_of(adapters, key_map, trained)
    with written_whole(out) as partial:
        copy_side_files(directory.parent, partial, out, cfg)
        write_merged(reader, cfg, key_map, changes, partial, on_bytes)
    folded, kinds = folded_names(adapters), _stored_kinds(out)
    return len(adapters.maps()), len(folded), sum(kinds.get(n, "plain") != "plain" for n in folded)


def _is_packed(cfg: RunConfig) -> bool:
    return cfg.model.moe.expert_format == "mxfp4"


def _on_experts(adapters: Adapters) -> bool:
    return any(adapters.names.maps[name].num_experts for name in adapters.maps())


def _adapters(trained: RunAdapters | None, adapter: Any, names: PeftNames) -> Adapters:
    if trained is None:
        return PeftFolder(adapter, names)
    ours, theirs = trained.names.maps.values(), names.maps.values()
    sizes = [[(m.path, m.place, m.in_size, m.out_size) for m in maps] for maps in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{trained.step_dir} was trained on another model than the base: their linear maps "
            "differ in number or size."
        )
    return trained.under(names)


def _check_base(
    trained: RunAdapters | None, base: pathlib.Path, read: Callable[[str], np.ndarray]
) -> None:
    """Compares the smaller leaves of a base with the fingerprint of the one trained on."""
    if trained is None:
        return
    marks = {
        name: mark
        for name, mark in trained.position.get("base", {}).items()
        if math.prod(mark[0]) <= _SMALL and mark[1] != "uint8" and not is_scale(name)
    }
    leaves = {
        name: stored_as(read(name.partition("/")[2]), dtype)
        for name, (_, dtype, _) in marks.items()
    }
    check_base(trained.step_dir, str(base), marks, fingerprint(leaves))


def _whole(source: HfSource, leaf: str) -> np.ndarray:
    everything = (slice(None),) * len(source.map.leaves[leaf].shape)
    return source.read_leaf(leaf, everything, np.float32)


def _stored_kinds(workdir: pathlib.Path) -> dict[str, str]:
    """How the tensors of an import were stored: name -> plain, mxfp4, fp8."""
    path = workdir / HF_FOLDER / MANIFEST
    if not path.is_file():
        return {}
    tensors = json.loads(path.read_text(encoding="utf-8"))["tensors"]
    return {name: kind for name, (kind, _, _) in tensors.items()}
