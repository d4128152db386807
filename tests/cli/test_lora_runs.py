"""Runs that train adapters: what they say and save, going on, the base that must stay the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moejax.checkpoint import read_config
from moejax.checkpoint.reader import read_meta
from moejax.cli.evaluate_alone import own_window
from moejax.cli.main import main
from moejax.config.load import as_run_config
from tests.cli.conftest import flags
from tests.e2e.small import assert_same_bits, copied, saved

LORA = {
    "lora__rank": 2, "lora__targets": ("q_b_proj", "gate_proj", "o_proj"), "optim__qk_clip": 0.0,
    "train__num_steps": 4, "checkpoint__every": 2, "data__seq_len": 16,
}  # fmt: skip


def adapt(moejax, workdir: Path, base: Path, **changes):
    fields = LORA | {"init_from": str(base)} | changes
    return moejax("train", "--config=tiny", f"--workdir={workdir}", *flags(**fields))


@pytest.fixture(scope="module")
def base(run_dir, tmp_path_factory) -> Path:
    """A copy of the trained base that a test may move."""
    return Path(shutil.copytree(run_dir, tmp_path_factory.mktemp("base") / "work"))


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory) -> Path:
    """The workdir of a finished run, for tests that only read it."""
    workdir = tmp_path_factory.mktemp("adapted") / "work"
    fields = flags(**LORA, init_from=str(base))
    assert main(["train", "--config=tiny", f"--workdir={workdir}", *fields]) == 0
    return workdir


def test_a_run_says_what_it_adapts_and_saves_nothing_of_the_base(moejax, base, tmp_path):
    workdir = tmp_path / "work"
    done = adapt(moejax, workdir, base)
    assert done.code == 0, done.err
    assert "adapters:" in done.out and "parameters trained" in done.out
    listed = json.loads((workdir / "adapters.json").read_text())
    assert {a["module"].rpartition(".")[2] for a in listed["adapters"]} == {
        "q_b_proj", "gate_proj", "o_proj"
    }  # fmt: skip
    assert f"{listed['parameters']:,} parameters trained" in done.out
    leaves = read_meta(workdir / "checkpoints" / "4")["leaves"]
    weights = [name for name in leaves if name.startswith("params/")]
    assert weights and all("/lora/" in name for name in weights)
    assert sum(np.prod(leaves[name][0]) for name in weights) == listed["parameters"]
    state = [name for name in leaves if name.startswith("opt_state/")]
    assert all("/lora/" in name or not leaves[name][0] for name in state)


def test_going_on_repeats_the_unbroken_run_bit_for_bit(moejax, adapted, base, tmp_path):
    broken = tmp_path / "broken"
    assert adapt(moejax, broken, base, train__stop_at=2).code == 0
    done = adapt(moejax, broken, base)
    assert done.code == 0 and "resuming from" in done.out
    assert_same_bits(saved(broken, 4), saved(adapted, 4))


def test_another_base_is_refused_by_name(moejax, adapted, run_dir, tmp_path):
    workdir = copied(adapted, tmp_path / "work")
    other = tmp_path / "other"
    assert moejax("train", "--config=tiny", f"--workdir={other}", *flags(seed=5)).code == 0
    for changed in (
        adapt(moejax, workdir, other, train__num_steps=6),
        moejax("eval", f"--workdir={workdir}", f"--config.init_from={other}"),
    ):
        assert changed.code == 2 and changed.err.count("\n") == 1
        assert "was trained over another base" in changed.err
        assert "over another base: " in changed.err and " has other values." in changed.err
    gone = adapt(moejax, workdir, tmp_path / "gone", train__num_steps=6)
    assert gone.code == 2 and gone.err.count("\n") == 1 and "gone" in gone.err


def test_a_base_that_has_moved_is_told_with_the_option_that_mends_it(
    moejax, adapted, base, tmp_path
):
    workdir, moved = copied(adapted, tmp_path / "work"), tmp_path / "moved"
    commands = {
        "--base": (
            ("generate", f"--checkpoint={workdir}", "--prompt=a", "--max-new-tokens=1"),
            ("merge-lora", f"--workdir={workdir}", f"--out={tmp_path / 'merged'}"),
        ),
        "--config.init_from": (
            ("train", f"--config={workdir}", f"--workdir={workdir}",
             "--config.train.num_steps=5", "--config.log.progress=False"),
            ("eval", f"--workdir={workdir}"),
        ),
    }  # fmt: skip
    base.rename(moved)
    try:
        for option, calls in commands.items():
            for argv in calls:
                refused = moejax(*argv)
                assert refused.code == 2 and refused.err.count("\n") == 1, refused.err
                assert f"the base of this LoRA run is not there: {base} " in refused.err
                assert f"{option}=DIR" in refused.err
        assert moejax(*commands["--base"][0], f"--base={moved}").code == 0
        assert moejax("export-lora", workdir, f"--out={tmp_path / 'file'}").code == 0
    finally:
        moved.rename(base)


def test_another_scale_is_refused(moejax, adapted, base, tmp_path):
    workdir = copied(adapted, tmp_path / "work")
    for changed in (
        adapt(moejax, workdir, base, train__num_steps=6, lora__alpha=99.0),
        adapt(moejax, workdir, base, train__num_steps=6, lora__rslora=True),
        moejax("eval", f"--workdir={workdir}", "--config.lora.alpha=99"),
    ):
        assert changed.code == 2 and changed.err.count("\n") == 1
        assert "another scale is another model" in changed.err


def test_another_model_is_refused_by_field_whether_the_run_is_finished_or_not(
    moejax, adapted, base, run_dir
):
    dim = flags(model__dim=48)
    for num_steps in (4, 9):
        for changes, field in (
            ({"lora__rank": 4}, "lora.rank=4 (was 2)"),
            ({"lora__alpha": 4.0}, "lora.alpha=4.0 (was 16.0)"),
            ({"lora__targets": ("o_proj",)}, "lora.targets=('o_proj',) (was ('q_b_proj', "),
        ):
            refused = adapt(moejax, adapted, base, **changes, train__num_steps=num_steps)
            assert refused.code == 2 and refused.err.count("\n") == 1
            assert "Fields that differ: " in refused.err and field in refused.err
    plain = moejax("train", "--config=tiny", f"--workdir={run_dir}", *dim)
    assert plain.code == 2 and "Fields that differ: model.dim=48 (was 32)" in plain.err


def test_a_merged_run_is_evaluated_in_the_rows_of_the_run(moejax, adapted, base, tmp_path):
    out = tmp_path / "merged"
    assert moejax("merge-lora", f"--workdir={adapted}", f"--out={out}").code == 0
    for workdir, step, window in ((base, 2, 32), (adapted, 4, 16), (out, 0, 16)):
        assert own_window(workdir / "checkpoints" / str(step)) == window
    data = [as_run_config(read_config(place)).data for place in (adapted, out)]
    assert data[0] == data[1]


def test_adapters_are_no_model_to_start_from_or_to_export(moejax, adapted, tmp_path):
    for refused in (
        adapt(moejax, tmp_path / "new", adapted),
        moejax("export-hf", str(adapted), f"--out={tmp_path / 'out'}"),
    ):
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert "moejax merge-lora" in refused.err
    assert not (tmp_path / "out").exists()


def test_the_adapted_model_is_evaluated_and_loaded(moejax, adapted):
    import moejax as package

    workdir = adapted
    result = moejax("eval", f"--workdir={workdir}", "--json")
    assert result.code == 0
    line = json.loads(result.out.strip().splitlines()[-1])
    final = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["loss"] == pytest.approx(final["eval_loss"], rel=1e-5)
    logits = package.load(workdir).logits([[1, 2, 3]])
    assert np.isfinite(logits).all()


@pytest.mark.slow
def test_without_init_from_the_base_is_what_the_seed_gives(moejax, tmp_path):
    workdir = tmp_path / "work"
    fields = LORA | {"train__stop_at": 2}
    for _ in range(2):
        run = moejax("train", "--config=tiny", f"--workdir={workdir}", *flags(**fields))
        assert run.code == 0, run.err
        fields = LORA
    assert moejax("eval", f"--workdir={workdir}").code == 0
    changed = moejax(
        "train", "--config=tiny", f"--workdir={workdir}",
        *flags(**LORA | {"seed": 9, "train__num_steps": 6}),
    )  # fmt: skip
    assert changed.code == 2 and "was trained over another base" in changed.err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora__targets": ("q_porj",)}, "matches no linear map"),
        ({"lora__targets": ()}, "nothing is targeted"),
        ({"optim__qk_clip": 100.0}, "qk_clip"),
        ({"model__vocab_size": 300, "init_allow": ("embed.*", "head.*")}, "adapters alone"),
        (
            {
                "model__moe__expert_format": "mxfp4",
                "model__moe__latent_dim": 32,
                "model__moe__expert_dim": 32,
            },
            "has no experts in MXFP4",
        ),
        ({"optim__ema_decay": 0.9}, "ema_decay"),
        ({"lora__rank": 0, "lora__alpha": 8.0, "lora__strict": True}, "lora.rank=0"),
    ],
)
def test_settings_that_cannot_be_are_one_line(moejax, base, tmp_path, fields, message):
    refused = adapt(moejax, tmp_path / "work", base, **fields)
    assert refused.code == 2 and refused.err.count("\n") == 1 and message in refused.err
    assert not (tmp_path / "work").exists()


def test_config_counts_adapters_and_what_is_trained(moejax):
    lora = ("--config.lora.rank=2", "--config.lora.targets=('q_b_proj',)", "--json")
    shown = moejax("config", "--config=tiny", "--devices=8", *lora)
    assert shown.code == 0, shown.err
    counts = json.loads(shown.out)["parameters"]
    assert counts["trained"] == counts["by_part"]["adapters"] > 0
    whole = moejax("config", "--config=tiny", "--devices=8")
    assert "\ntrained " not in whole.out
