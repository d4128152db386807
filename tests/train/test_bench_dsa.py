"""Recall is what it says, and the program tells what its runs recorded."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from moejax.config.load import load_config
from moejax.layers.dsa_recall import chosen_mass
from moejax.train import bench_dsa as bench
from tests.cli.conftest import SMALL

TINY = {
    **SMALL, "model.num_layers": 2, "model.attention": "dsa", "mesh.fsdp": -1, "eval.batches": 1,
}  # fmt: skip
TINY.pop("train.num_steps")


def test_mass_of_chosen_random_and_best_keys():
    """Two documents and padding, against sums written out in float64."""
    B, T, N, J = 2, 12, 3, 3
    rng = np.random.default_rng(0)
    shapes = (B, T, N, 4), (B, T, N, 2), (B, T, 4), (B, T, 2)
    q, qr, k, kr = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    segments = np.array([[1] * 5 + [2] * 7, [1] * 10 + [0] * 2], np.int32)
    indices, want = np.full((B, T, J), -1, np.int32), np.zeros((3, B))
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t] > 0]
            indices[b, t, : min(J, len(seen))] = seen[:J]  # the oldest ones
            if len(seen) <= J:
                continue
            z = 0.5 * (q[b, t] @ k[b, seen].T + qr[b, t] @ kr[b, seen].T).astype(np.float64)
            p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
            p = p.mean(0)
            want[:, b] += p[:J].sum(), J / len(seen), np.sort(p)[-J:].sum()
    found = jax.jit(chosen_mass, static_argnames="scale")(
        q, qr, k, kr, jnp.asarray(indices), jnp.asarray(segments), scale=0.5
    )
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_the_settings_of_every_run(tmp_path):
    cfgs = {
        name: load_config("tiny", fields)
        for name, fields in bench.settings_of(tmp_path, (8, 8, 8), {"optim.lr": "0.01"}).items()
    }
    assert [c.model.dsa.stage for c in cfgs.values()] == ["frozen", "warmup", "sparse", "frozen"]
    T = cfgs["base"].data.seq_len
    assert [c.model.dsa.top_k for c in cfgs.values()] == [T, T // 8, T // 8, T]
    assert {c.optim.lr for c in cfgs.values()} == {0.01}
    later = {name: str(tmp_path / name) for name in ("base", "warmup")}
    starts = ["", later["base"], later["warmup"], later["warmup"]]
    assert [c.init_from for c in cfgs.values()] == starts
    one, other = (cfgs[name] for name in ("sparse", "dense"))
    assert one.replace(model=other.model) == other  # the same batches, rates and steps


FOUND = {
    "seq_len": 256, "top_k": 32,
    "recall": {"steps": [0, 5], "layers": [[0.5, 0.7], [0.93, 0.95]], "random": [0.2, 0.3],
               "after_sparse": [0.96, 0.98]},
    "warmup_kl": {"steps": [1, 5], "mean_of_layers": [0.9, 0.2]},
    "loss_before": {"dense": 3.0, "fresh indexer": 3.5, "indexer after warm-up": 3.02},
    "loss": {"base": ([4, 8], [3.2, 3.0]), "sparse": ([4, 8], [2.95, 2.92]),
             "dense": ([4, 8], [2.94, 2.9])},
    "sparse_over_dense": 2.92 / 2.9,
}  # fmt: skip


def test_table_and_picture(tmp_path):
    text = bench.table(FOUND)
    assert "recall of random picks: 0.250 (layers 0.200 0.300)" in text
    assert "recall at warm-up step 5: 0.940 (layers 0.930 0.950)" in text
    assert "sparse / dense: 1.0069, goal at most 1.02" in text
    assert "fresh indexer 3.5000" in text and "2.9200 at 8" in text
    assert imread(bench.draw(FOUND, tmp_path / "x.png")).shape[:2] == (462, 1430)


def test_help_and_bad_input(capsys, tmp_path):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in ("out DIR", "steps BASE WARMUP ON", "until {base,warmup,sparse,dense}"):
        assert f" --{option} " in shown
    with pytest.raises(SystemExit):
        bench.main(["--stesp=3"])
    assert "unknown option '--stesp=3'" in capsys.readouterr().err
    assert bench.main([f"--out={tmp_path}", "--config.data.seq_len=many"]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_whole_program_at_toy_size(tmp_path, capsys):
    """All four runs, the measures, and a second call that only measures."""
    fields = [f"--config.{name}={value}" for name, value in TINY.items()]
    arguments = [f"--out={tmp_path}", "--steps", "2", "2", "2", *fields]
    assert bench.main([*arguments, "--until=warmup"]) == 0
    assert not (tmp_path / "dsa.json").exists()
    assert bench.main(arguments) == 0
    found = json.loads((tmp_path / "dsa.json").read_text())
    assert (found["seq_len"], found["top_k"]) == (32, 4)
    assert found["recall"]["steps"] == [0, 1, 2] and len(found["recall"]["random"]) == 2
    assert 0 < min(found["recall"]["layers"][0]) and max(found["recall"]["random"]) < 1
    assert found["loss_before"]["dense"] == found["loss"]["base"][1][-1]
    assert (tmp_path / "dsa.png").stat().st_size > 10_000
    assert "recall of random picks" in capsys.readouterr().out


@pytest.mark.slow
def test_the_indexer_learns_and_few_keys_are_enough(tmp_path):
    """At its own size, on real text: recall from 63 % to 90 %, at most 2 % of loss at an eighth."""
    alone = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    subprocess.run(
        [sys.executable, "-m", "moejax.train.bench_dsa", f"--out={tmp_path}"], env=alone, check=True
    )
    found = json.loads((tmp_path / "dsa.json").read_text())
    assert found["top_k"] * 8 == found["seq_len"] == 256
    recall = found["recall"]
    assert max(recall["random"]) < 0.75 and max(recall["layers"][0]) < 0.8
    assert min(recall["layers"][-1]) >= bench.RECALL_GOAL
    assert found["sparse_over_dense"] <= bench.LOSS_GOAL
    # the warm-up moves nothing of the main path, and both begin from it
    _, losses = bench._losses(tmp_path / "warmup")
    assert losses[-1] == pytest.approx(found["loss_before"]["dense"], rel=1e-6)
