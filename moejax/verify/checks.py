"""The checks of a card. Each gives whether it holds, a line for people, and figures."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import numpy as np

from moejax.checkpoint import Checkpoints, HfFolder
from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_import import import_hf
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import named_leaves
from moejax.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    as_dict,
)
from moejax.generate.load import load
from moejax.generate.model import shifted
from moejax.partitioning import make_mesh, num_batch_shards
from moejax.train.initial import start_from_weights
from moejax.train.state import TrainState, abstract_tree, as_tree, build_program, from_tree
from moejax.train.step import batch_sharding, train_step

Case = dict[str, np.ndarray]
_IDS, _LOGITS = "input_ids", "logits"


class Skipped(Exception):
    """A check that there is nothing to check for; the message says why."""


@dataclasses.dataclass
class Setting:
    """What the checks share: the source, a folder to write in, and what earlier checks made."""

    path: pathlib.Path
    folder: pathlib.Path
    cases: dict[str, Case]
    routing: str
    tolerance: float
    mesh: MeshConfig
    trained: TrainState | None = None

    @functools.cached_property
    def source(self) -> HfSource:
        """The checked folder."""
        return HfSource(self.path)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """Rows for a training step: the reference's, or fixed random ones."""
        for case in self.cases.values():
            return case[_IDS]
        vocab = self.source.cfg.vocab_size
        return np.random.default_rng(0).integers(0, vocab, (1, 64)).astype(np.int32)

    @functools.cached_property
    def program(self) -> Any:
        """The training program of one step with AdamW on these rows."""
        mesh = make_mesh(self.mesh)
        rows = num_batch_shards(dict(mesh.shape))
        cfg = RunConfig(
            model=self.source.cfg,
            mesh=self.mesh,
            init_from=str(self.path),
            data=DataConfig(seq_len=self.tokens.shape[1], batch_size=rows),
            optim=OptimConfig(name="adamw", lr=1e-4, schedule="constant", warmup_fraction=0.0),
            train=TrainConfig(num_steps=2),
            checkpoint=CheckpointConfig(asynchronous=False, keep=1),
        )
        return build_program(cfg, mesh)

    @functools.cached_property
    def step(self) -> Any:
        """The compiled training step: (state, batch) -> (state, metrics)."""
        return jax.jit(functools.partial(train_step, self.program))

    def batch(self) -> dict[str, jax.Array]:
        """One microbatch of the rows, each repeated to fill the mesh."""
        rows = self.program.cfg.data.batch_size
        tokens = np.resize(self.tokens, (rows, self.tokens.shape[1])).astype(np.int32)
        segments = np.ones_like(tokens)
        arrays = {"tokens": tokens, "segment_ids": segments, "labels": shifted(tokens, segments)}
        where = batch_sharding(self.program)
        return {name: jax.device_put(array[None], where) for name, array in arrays.items()}


def read_reference(path: pathlib.Path) -> dict[str, Case]:
    """Cases of a reference by prefix: `input_ids`, `logits` and what else they have.

    Raises:
      ConfigError: no such file, or no case in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"reference {path} cannot be read: {reason}.") from error
    cases: dict[str, Case] = {}
    for name in arrays:
        if name.endswith(_IDS):
            prefix = name.removesuffix(_IDS)
            own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            if _LOGITS in own:
                cases[prefix] = own | {_IDS: np.atleast_2d(own[_IDS])}
    if not cases:
        raise ConfigError(
            f"reference {path} has no case: it needs input_ids and logits (any prefix, the same "
            f"for both); it has {', '.join(sorted(arrays)[:8])}."
        )
    return cases


Result = tuple[bool, str, dict[str, Any]]


def load_folder(at: Setting) -> Result:
    """Headers, index and config.json are read, and say a model that we have."""
    source = at.source
    size, files = source.folder.total_bytes, len(source.folder.files)
    facts = {"model_type": source.raw_config["model_type"], "files": files, "bytes": size}
    return True, f"{facts['model_type']}, {files} files, {size / 1e9:.3f} GB", facts


def key_coverage(at: Setting) -> Result:
    """Every tensor has its place, and every place its tensor."""
    source = at.source
    values = sum(math.prod(entry.shape) for entry in source.map.entries.values())
    facts = {
        "tensors": len(source.tensors),
        "carried": len(source.carried),
        "absent": source.absent,
        "values": values,
    }
    line = f"{facts['tensors']:,} tensors, {values:,} values; {facts['carried']} carried along"
    return True, line, facts


def dtype_report(at: Setting) -> Result:
    """How values are stored."""
    counts: dict[str, int] = {}
    for tensor in at.source.tensors.values():
        kind = tensor.dtype if tensor.kind == "plain" else tensor.kind
        counts[kind] = counts.get(kind, 0) + math.prod(tensor.shape)
    return True, ", ".join(f"{n:,} in {kind}" for kind, n in sorted(counts.items())), counts


def import_folder(at: Setting) -> Result:
    """The folder becomes a checkpoint."""
    report = import_hf(at.path, at.folder / "imported")
    speed = report.source_bytes / 1e6 / max(report.seconds, 1e-9)
    facts = {"seconds": report.seconds, "mb_per_s": speed, "dtypes": report.dtypes}
    return True, f"{speed:.0f} MB/s", facts


def export_round_trip(at: Setting) -> Result:
    """The checkpoint becomes the folder again, bit for bit."""
    if not (at.folder / "imported").exists():
        raise Skipped("nothing was imported")
    export_hf(at.folder / "imported", at.folder / "exported")
    before, after = at.source.folder, HfFolder(at.folder / "exported")
    differing = [
        key for key in before.keys()
        if key not in after.keys() or bytes(after.raw(key)) != bytes(before.raw(key))
    ]  # fmt: skip
    extra = [key for key in after.keys() if key not in before.keys()]
    facts = {
        "differing": differing[:8],
        "extra": extra[:8],
        "config": after.config == before.config,
    }
    if differing or extra or not facts["config"]:
        return False, f"{len(differing)} keys differ, {len(extra)} are new: {differing[:2]}", facts
    return True, f"all {len(before.keys()):,} keys bit-equal, config.json equal", facts


def logits(at: Setting) -> Result:
    """Logits against the reference; without one, that they are finite."""
    model = load(at.path, mesh=at.mesh)
    if not at.cases:
        ok = bool(np.isfinite(np.asarray(model.logits(at.tokens))).all())
        return ok, f"no reference given; {'finite' if ok else 'not finite'}", {"reference": False}
    facts: dict[str, Any] = {"reference": True, "routing": at.routing, "cases": {}}
    for prefix, case in at.cases.items():
        want = case[_LOGITS].reshape(*case[_IDS].shape, -1)
        pins = _pins(model, case) if at.routing == "pinned" else None
        got = np.asarray(model.logits(case[_IDS], pinned_experts=pins))
        error, scale = float(np.abs(got - want).max()), float(np.abs(want).max())
        facts["cases"][prefix] = {"max_abs": error, "relative": error / scale}
    worst = max(case["relative"] for case in facts["cases"].values())
    largest = max(case["max_abs"] for case in facts["cases"].values())
    line = (
        f"{len(at.cases)} cases, routing {at.routing}: max abs {largest:.1e}, relative {worst:.1e} "
        f"(tolerance {at.tolerance:g})"
    )
    return worst <= at.tolerance, line, facts


def _pins(model: Any, case: Case) -> np.ndarray:
    """Experts of the reference for every layer that it names; all must be named."""
    moe, layers = model.config.moe, model.config.num_layers
    pins = np.zeros((layers, *case[_IDS].shape, moe.top_k), np.int32)
    for layer in model.parts.moe_layers():
        name = f"router_idx_{layer}"
        if name not in case:
            raise ConfigError(f"routing=pinned needs {name} in the reference.")
        pins[layer] = case[name].reshape(pins.shape[1:])
    return pins


def train_one_step(at: Setting) -> Result:
    """One AdamW step from the weights: loss and every gradient are finite."""
    with jax.set_mesh(at.program.mesh):
        state, _ = start_from_weights(at.program, lambda line: None)
        at.trained, metrics = at.step(state, at.batch())
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    finite = bool(metrics["finite"])
    facts = {"loss": loss, "grad_norm": norm, "finite": finite}
    return finite, f"loss {loss:.4f}, gradient norm {norm:.3f}", facts


def save_and_resume(at: Setting) -> Result:
    """The state saved and restored is the same bits, and so is the step after it."""
    if at.trained is None:
        raise Skipped("no step was trained")
    program, seed = at.program, at.program.cfg.seed
    saved = Checkpoints(at.folder / "run", program.cfg.checkpoint.replace(dir=""))
    saved.save(1, as_tree(at.trained, seed), position={}, config=as_dict(program.cfg))
    saved.close()
    back = from_tree(Checkpoints(at.folder / "run").restore(1, abstract_tree(program)).state)
    differing = _differing(at.trained, back)
    with jax.set_mesh(program.mesh):
        straight, _ = at.step(at.trained, at.batch())
        resumed, _ = at.step(back, at.batch())
    later = _differing(straight, resumed)
    facts = {"restored_differing": differing, "next_step_differing": later}
    if differing or later:
        return False, f"not the same bits: {(differing + later)[:2]}", facts
    return True, f"{len(jax.tree.leaves(back))} arrays bit-equal, and after one more step", facts


def _differing(a: Any, b: Any) -> list[str]:
    pairs = zip(named_leaves(a).items(), jax.tree.leaves(b), strict=True)
    return [n for (n, x), y in pairs if np.asarray(x).tobytes() != np.asarray(y).tobytes()]


def export_trained(at: Setting) -> Result:
    """The trained weights go out in float32 and come back the same."""
    if at.trained is None or not (at.folder / "run").exists():
        raise Skipped("no step was saved")
    export_hf(at.folder / "run", at.folder / "trained", dtype="float32", experts="float32")
    again = HfSource(at.folder / "trained")
    moved, differing = 0, []
    for tree, root in ((at.trained.params, ""), (at.trained.balance, "")):
        for name, leaf in named_leaves(tree).items():
            whole = tuple(slice(0, n) for n in leaf.shape)
            if (
                again.read_leaf(root + name, whole, np.float32).tobytes()
                != np.asarray(leaf).tobytes()
            ):
                differing.append(name)
    for name in list(at.source.tensors)[:64]:
        moved += int(at.source.read(name).tobytes() != again.read(name).tobytes())
    facts = {"differing": differing[:8], "moved_of_first_64": moved}
    if differing:
        return False, f"{len(differing)} leaves differ: {differing[:2]}", facts
    return bool(moved), f"the {len(again.tensors):,} tensors hold the trained weights", facts
