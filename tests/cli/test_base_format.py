"""A LoRA run over a base in 8 bits: saved, gone on with, refused, used and merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moejax.checkpoint.base import check_base, check_scale, fingerprint
from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.quantised_weights import stored_as
from moejax.checkpoint.reader import read_meta
from moejax.cli.main import main
from moejax.config import LoraConfig
from tests.cli.conftest import flags
from tests.cli.test_lora_runs import LORA
from tests.e2e.small import assert_same_bits, copied, saved

CODED = LORA | {"lora__base_format": "fp8"}


def adapt(moejax, workdir: Path, base: Path, **changes):
    fields = CODED | {"init_from": str(base)} | changes
    return moejax("train", "--config=tiny", f"--workdir={workdir}", *flags(**fields))


@pytest.fixture(scope="module")
def adapted(run_dir, tmp_path_factory) -> Path:
    """The workdir of a finished run, for tests that only read it."""
    workdir = tmp_path_factory.mktemp("coded") / "work"
    fields = flags(**CODED, init_from=str(run_dir))
    assert main(["train", "--config=tiny", f"--workdir={workdir}", *fields]) == 0
    return workdir


def test_going_on_repeats_the_unbroken_run_bit_for_bit(moejax, adapted, run_dir, tmp_path):
    broken = copied(adapted, tmp_path / "broken")
    shutil.rmtree(broken / "checkpoints" / "4")
    done = adapt(moejax, broken, run_dir)
    assert done.code == 0, done.err
    assert "resuming from" in done.out and "of these in fp8, a scale for each output" in done.out
    assert_same_bits(saved(broken, 4), saved(adapted, 4))
    meta = read_meta(broken / "checkpoints" / "4")
    assert not any("_scale" in name for name in meta["leaves"])
    marks = meta["position"]["base"]
    assert marks["params/stack0/run0/attn/q_a"][1] == "float8_e4m3fn"
    assert marks["params/stack0/run0/attn/q_a_scale"][1] == "float32"


@pytest.mark.slow
def test_it_is_merged_into_the_plain_base_which_then_is_another(moejax, adapted, run_dir, tmp_path):
    out = tmp_path / "merged"
    merged = moejax("merge-lora", f"--workdir={adapted}", f"--out={out}")
    assert merged.code == 0, merged.err
    before, after = (
        LeafReader(folder / "checkpoints" / step) for folder, step in ((run_dir, "2"), (out, "0"))
    )
    for leaf, changes in (("attn/q_b", True), ("attn/kv_a", False)):
        values = [one.read(f"params/stack0/run0/{leaf}") for one in (before, after)]
        assert np.array_equal(*values) != changes
        assert np.abs(values[0] - values[1]).max() < 0.1
    workdir = copied(adapted, tmp_path / "work")
    refused = adapt(moejax, workdir, out, train__num_steps=6)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "was trained over another base" in refused.err and " has other values." in refused.err


@pytest.mark.slow
def test_a_merge_over_another_base_is_refused(moejax, adapted, tmp_path):
    """Told by its codes, which the merge makes anew."""
    other = tmp_path / "other"
    assert moejax("train", "--config=tiny", f"--workdir={other}", *flags(seed=5)).code == 0
    where = (f"--workdir={adapted}", f"--base={other}", f"--out={tmp_path / 'out'}")
    refused = moejax("merge-lora", *where)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "was trained over another base" in refused.err


def test_another_form_of_the_base_is_refused():
    saved_with = {"rank": 2, "base_format": "fp8"}
    check_scale("step", saved_with, LoraConfig(rank=2, base_format="fp8"))
    for form in ("plain", "int8"):
        with pytest.raises(CheckpointError, match=r"learned over lora\.base_format='fp8', not"):
            check_scale("step", saved_with, LoraConfig(rank=2, base_format=form))
    with pytest.raises(CheckpointError, match="'plain', not 'fp8'"):
        check_scale("step", {"rank": 2}, LoraConfig(rank=2, base_format="fp8"))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_other_codes_are_another_base(dtype):
    values = np.arange(96, dtype=np.float32).reshape(1, 1, 8, 12)
    codes, others = (stored_as(x, dtype) for x in (values, values.T.reshape(values.shape)))
    assert str(codes.dtype) == dtype
    marks = fingerprint({"params/q": codes})
    check_base("step", "base", marks, fingerprint({"params/q": stored_as(values, dtype)}, marks))
    with pytest.raises(CheckpointError, match="another base: q has other values"):
        check_base("step", "base", marks, fingerprint({"params/q": others}, marks))


def test_it_does_not_go_with_training_its_maps(moejax, run_dir, tmp_path):
    workdir = tmp_path / "work"
    for changes, words in (
        ({"train__trainable": ("*.attn.q_a",)}, "in 8 bits, which cannot be trained"),
        ({"lora__rank": 0, "lora__targets": ()}, "lora.rank=0"),
    ):
        refused = adapt(moejax, workdir, run_dir, **changes)
        assert refused.code == 2 and refused.err.count("\n") == 1 and words in refused.err
    assert not workdir.exists()


@pytest.mark.slow
def test_it_is_evaluated_and_loaded(moejax, adapted):
    import moejax as package

    shown = moejax("eval", f"--workdir={adapted}", "--json")
    assert shown.code == 0, shown.err
    loss = json.loads(shown.out.strip().splitlines()[-1])["loss"]
    final = json.loads((adapted / "metrics.jsonl").read_text().splitlines()[-1])
    assert loss == pytest.approx(final["eval_loss"], rel=1e-5)
    logits = package.load(adapted, dtype="bfloat16").logits([[1, 2, 3]])
    assert np.isfinite(logits).all()
    text = moejax("generate", f"--checkpoint={adapted}", "--prompt=The", "--max-new-tokens=4")
    assert text.code == 0, text.err


@pytest.mark.slow
def test_without_init_from_the_base_is_what_the_seed_gives(moejax, tmp_path):
    """The codes drawn with a run are those of the same weights read from a checkpoint."""
    seeded, read, plain = (tmp_path / name for name in ("seeded", "read", "plain"))
    assert adapt(moejax, seeded, Path(), init_from="").code == 0
    assert moejax("eval", f"--workdir={seeded}").code == 0
    still = flags(optim__lr=1e-30, optim__adam_lr=1e-30, optim__qk_clip=0.0)
    assert moejax("train", "--config=tiny", f"--workdir={plain}", *still).code == 0
    assert adapt(moejax, read, plain).code == 0
    marks = [read_meta(run / "checkpoints" / "4")["position"]["base"] for run in (seeded, read)]
    assert marks[0] == marks[1]
