"""The folder of a run: whether it can be written, and the facts that lie beside checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping

import jax

from moejax.checkpoint import Checkpoints, layout
from moejax.config import ConfigError, RunConfig, as_dict
from moejax.config.load import RESOLVED_FILE
from moejax.data import Corpus, Tokenizer
from moejax.version import __version__


def local_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """The workdir as a path.

    Raises:
      ConfigError: it is the address of an object store, which a path would make a folder of here.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(
            f"--workdir={text} is not a folder: the run appends to files and locks them there, "
            "which object stores cannot. Use a shared folder, or mount the bucket (gcsfuse, "
            "mountpoint-s3); --config.checkpoint.dir=gs://... keeps checkpoints in one."
        )
    return pathlib.Path(text)


def check_writable(workdir: pathlib.Path) -> None:
    """Raises ConfigError when nothing can be written below `workdir`; changes nothing."""
    place = workdir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(
            f"workdir {workdir} cannot be used: {place} is not a folder. Choose another --workdir."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"workdir {workdir} is not writable: no permission in {place}. "
            "Choose another --workdir."
        )


def check_not_moved(workdir: pathlib.Path, checkpoints: Checkpoints) -> None:
    """Raises ConfigError where a run would begin anew since its checkpoints lie elsewhere."""
    if checkpoints.latest_step() is not None:
        return
    before = layout.kept_elsewhere(workdir) or workdir / layout.SUBDIR
    if layout.steps_in(layout.as_path(before)):
        raise ConfigError(
            f"{checkpoints.directory} is empty, but the run in {workdir} has its checkpoints in "
            f"{before}: set checkpoint.dir to that, or copy them."
        )


@contextlib.contextmanager
def leaving_no_tokenizer(workdir: pathlib.Path) -> Iterator[None]:
    """Takes back the tokenizer that a failed preparation trained."""
    tokenizer = workdir / "tokenizer.json"
    had_tokenizer = tokenizer.exists()
    try:
        yield
    except ConfigError:
        if not had_tokenizer:
            tokenizer.unlink(missing_ok=True)
        raise


def write_facts(
    cfg: RunConfig, workdir: pathlib.Path, tokenizer: Tokenizer, corpora: Mapping[str, Corpus], mesh
) -> None:
    """Writes config.json (as resolved) and run.json (what else decides the numbers).

    Both stand beside the checkpoints.
    """
    if jax.process_index():
        return
    workdir.mkdir(parents=True, exist_ok=True)
    facts = {
        "moejax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}",
        "mesh": dict(mesh.shape),
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "corpus": {
            split: {"sha256": c.sha256, "documents": len(c), "bytes": c.num_bytes}
            for split, c in corpora.items()
        },
    }
    for file, content in ((RESOLVED_FILE, as_dict(cfg)), ("run.json", facts)):
        scratch = workdir / (file + ".tmp")
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, workdir / file)
