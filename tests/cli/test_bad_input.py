"""Whatever is wrong with the input: one line, exit code 2, nothing written."""

import shutil
from pathlib import Path

import jax
import pytest

from tests.cli.conftest import TEXT, flags


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _refused(outcome) -> str:
    """The one line of a refused command."""
    assert outcome.code == 2, outcome
    lines = outcome.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    return lines[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh.fsdp": 3}, "mesh fsdp=3 does not fit 8 devices"),
        ({"mesh.fsdp": -1, "mesh.data": -1}, "at most one may take what is left"),
        ({"mesh.tensor": 2}, "mesh.tensor=2 is not supported yet"),
        (
            {"mesh.expert": 8, "model.moe.num_experts": 12, "model.num_layers": 2},
            "model.moe.num_experts=12 does not divide over mesh.expert=8",
        ),
        ({"data.seq_len": 1}, "data.seq_len=1 is not allowed: it must be >= 2"),
        ({"optim.adam_b1": 1.5}, "optim.adam_b1=1.5 is not allowed: it must be >= 0 and < 1"),
        ({"data.batch_size": 12}, "Use a multiple of 8"),
        ({"model.moe.num_expert": 8}, "nearest: model.moe.num_experts"),
        ({"model.dim": "wide"}, "model.dim='wide' is not a whole number"),
        ({"data.paths": ("no/such/*.txt",)}, "'no/such/*.txt' names no file"),
        ({"data.paths": ()}, "needs data.paths"),
        ({"data.paths": (1, 2)}, "it must be a tuple of str like ('a', 'b')"),
        ({"optim.lr": "inf"}, "it must be finite and > 0"),
        ({"data.tokenizer": "no_tokenizer.json"}, "is not a file that exists"),
        (
            {"data.tokenizer": "bpe", "data.bpe_vocab_size": 400},
            "data.bpe_vocab_size=400 is more than model.vocab_size=257",
        ),
        ({"model.vocab_size": 256}, "the byte tokenizer has 257 tokens"),
        ({"data.seq_len": 1_000_000}, "less than one row of data.seq_len=1000000"),
        (
            {
                "data.seq_len": 1_000_000,
                "data.tokenizer": "bpe",
                "data.bpe_vocab_size": 300,
                "model.vocab_size": 300,
            },
            "less than one row of data.seq_len=1000000",
        ),
        ({"init_from": "no/such/run"}, "the path does not exist"),
        ({"optim.groups": (("(", 1, 1),)}, "is no regular expression: missing )"),
    ],
)
def test_a_setting_that_cannot_be_used(moejax, tmp_path, changes, says):
    workdir = tmp_path / "work"
    argv = flags(**{name.replace(".", "__"): value for name, value in changes.items()})
    line = _refused(moejax("train", "--config=tiny", f"--workdir={workdir}", *argv))
    assert says in line
    assert not workdir.exists()


def test_empty_data(moejax, tmp_path):
    empty, workdir = tmp_path / "empty.txt", tmp_path / "work"
    empty.touch()
    argv = flags(data__paths=(str(empty),))
    line = _refused(moejax("train", "--config=tiny", f"--workdir={workdir}", *argv))
    assert "hold no text: every file is empty" in line
    assert not workdir.exists()


def test_a_tokenizer_file_larger_than_the_vocabulary(moejax, tmp_path):
    tokenizer, workdir = tmp_path / "tokenizer.json", tmp_path / "work"
    source = ["--config.data.source=files", f"--config.data.paths=('{TEXT}/*.txt',)"]
    made = moejax(
        "tokenizer", "train", "--config=tiny", f"--out={tokenizer}", "--vocab-size=300", *source
    )
    assert made.code == 0 and made.out.startswith(f"{tokenizer}: 300 tokens")
    argv = flags(data__tokenizer=tokenizer)
    line = _refused(moejax("train", "--config=tiny", f"--workdir={workdir}", *argv))
    assert f"tokenizer {tokenizer} has 300 tokens, more than model.vocab_size=257" in line
    assert not workdir.exists()


def test_a_workdir_that_is_no_folder(moejax, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    for workdir in (file, file / "below"):
        line = _refused(moejax("train", "--config=tiny", f"--workdir={workdir}", *flags()))
        assert f"workdir {workdir} cannot be used: {file} is not a folder" in line
    assert file.read_text() == "kept"


def test_a_checkpoint_of_another_shape(moejax, run_dir):
    before = _tree(run_dir)
    argv = flags(model__dim=48, train__num_steps=4)
    line = _refused(moejax("train", "--config=tiny", f"--workdir={run_dir}", *argv))
    assert f"checkpoint {run_dir}/checkpoints/2 is of another shape: params/" in line
    assert _tree(run_dir) == before


def test_a_loss_that_is_not_a_number(moejax, run_dir, tmp_path):
    """Names the step and the first bad tensor, keeps the checkpoint before."""
    workdir = tmp_path / "work"
    shutil.copytree(run_dir, workdir)
    kept = _tree(workdir / "checkpoints")
    argv = flags(train__num_steps=9, optim__lr=1e30, optim__adam_lr=1e30)
    line = _refused(moejax("train", "--config=tiny", f"--workdir={workdir}", *argv))
    assert "at step 4: first bad tensor: gradient of embed.table; " in line, "the loss is finite"
    assert f"the last good checkpoint is {workdir}/checkpoints/2" in line
    assert _tree(workdir / "checkpoints") == kept


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trian"], "unknown command 'trian'. Did you mean train? Commands: train, eval"),
        (["train", "--workdir=x"], "--config is needed: one of base, deepseek_v3"),
        (["train", "--config=tiny"], "--workdir is needed"),
        (["train", "--config=tinny", "--workdir=x"], "Did you mean tiny?"),
        (["train", "--confg=tiny"], "unknown option '--confg=tiny'; nearest: --config"),
        (["train", "extra", "--config=tiny"], "unknown argument 'extra'"),
        (["train", "--config=tiny", "--workdir=x", "--config.model.dim"], "needs a value"),
        (["train", "--config=tiny", "--workdir=x", "--devices=none"], "is not a whole number"),
        (["train", "--config=tiny", "--workdir=x", "--devices=3"], "comes too late"),
        (["train", "--config=tiny", "--workdir=x", "--devices=8", "--platform=gpu"], "not go with"),
        (["train", "--config=tiny", "--workdir=gs://bucket/run"], "which object stores cannot"),
        (["eval"], "give one of --workdir=DIR and --checkpoint=PATH"),
        (["eval", "--workdir=no/such"], "no checkpoint at"),
        (["eval", "--workdir=x", "--split=test"], "invalid choice: 'test'"),
        (["config"], "--config is needed"),
        (["config", "--config=kimi_k3", "--devices=100"], "does not fit 100 devices"),
        (["config", "--config=kimi_k3", "--devices=100"], "Make the product of the fixed axes a"),
        (
            ["config", "--config=tiny", "--devices=1"],
            "more devices on the CPU (--devices=8)",
        ),
        (["config", "--config=tiny", "--config.mesh.fsdp=0"], "mesh.fsdp=0 is not allowed"),
        (
            ["config", "--config=tiny", "--config.optim.groups=(('[',1,0),)"],
            "'[' is no regular",
        ),
        (["config", "--config=tiny", "--config.optim.learning_rate=1"], "nearest: optim.lr, "),
        (["config", "--config=tiny", "--config.model=3"], "model.norm_eps, ... ("),
        (["config", "--config=."], "is a folder without config.json"),
        (["tokenizer"], "the action is `moejax tokenizer train`"),
        (["tokenizer", "make"], "unknown action 'make'"),
        (["tokenizer", "train", "--config=tiny"], "--out is needed"),
        (["tokenizer", "train", "--config=tiny", "--out=t.json", "--vocab-size=9"], ">= 258"),
    ],
)
def test_a_command_that_cannot_be_meant(moejax, argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jax.devices()  # JAX has started, whatever ran before
    assert says in _refused(moejax(*argv))
    assert not list(tmp_path.iterdir())
