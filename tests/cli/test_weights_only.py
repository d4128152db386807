"""A checkpoint of weights alone, written piece by piece, is evaluated as the run it came from."""

import json

import jax
import numpy as np
import pytest

from moejax.checkpoint import Checkpoints, StreamedCheckpoint, read_config
from moejax.checkpoint.layout import named_leaves, nest
from moejax.checkpoint.reader import read_meta


@pytest.fixture(scope="module")
def weights_only(run_dir, tmp_path_factory):
    """The run's last step without optimizer, step and key: what an import leaves."""
    step = run_dir / "checkpoints" / "2"
    leaves = {
        name: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
        for name, (shape, dtype) in read_meta(step)["leaves"].items()
        if name.split("/")[0] in ("params", "balance")
    }
    values = named_leaves(Checkpoints.restore_parts(step, nest(leaves)))
    workdir = tmp_path_factory.mktemp("imported") / "work"
    with StreamedCheckpoint(workdir, nest(leaves), config=read_config(run_dir)) as out:
        for name, x in values.items():
            out.write(name, (), x)
    return workdir


def test_eval_gives_the_same_numbers(moejax, run_dir, weights_only):
    want = json.loads(moejax("eval", f"--workdir={run_dir}", "--json").out)
    shown = moejax("eval", f"--workdir={weights_only}", "--json")
    assert shown.code == 0 and not shown.err
    got = json.loads(shown.out)
    assert got["step"] == 0 and got["num_tokens"] == want["num_tokens"]
    assert (got["loss"], got["nats_per_byte"]) == (want["loss"], want["nats_per_byte"])
