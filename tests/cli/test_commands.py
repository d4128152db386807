"""What each subcommand prints and returns, in this process and as a process of its own."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import pytest

import moejax
from moejax.cli import main as cli
from moejax.cli.evaluate import fit_to_devices
from moejax.cli.flags import split_overrides
from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.train.compile import enable_cache
from moejax.train.lock import sole_run
from tests.cli.conftest import TEXT, flags
from tests.environment import clean_environment

ROOT = Path(__file__).parents[2]


def _command(*argv: str, **env: str) -> subprocess.Popen:
    """The command as a process, away from the settings of this test run."""
    clean = clean_environment()
    return subprocess.Popen(
        [sys.executable, "-m", "moejax.cli.main", *argv],
        cwd=ROOT, env=clean | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_tells_options_config_and_examples(moejax, command):
    overview = moejax("--help")
    assert overview.code == 0 and f"  {command} " in overview.out
    shown = moejax(command, "--help")
    assert shown.code == 0 and not shown.err
    # The commands that convert or check weights read their config out of them, or draw a run.
    converts = command.endswith(("-hf", "-lora"))
    takes_config = not converts and command not in ("bench", "verify", "report", "place")
    config = ("--config.SECTION.FIELD=VALUE", "tiny") if takes_config else ()
    for part in ("usage: moejax", "examples:", *config):
        assert part in shown.out


def test_version_and_no_arguments(moejax):
    import moejax as package

    assert moejax("--version").out == f"moejax {package.__version__}\n"
    nothing = moejax()
    assert nothing.code == 2 and "usage: moejax COMMAND" in nothing.err


def test_importing_and_asking_for_help_is_light():
    """JAX comes in when it is needed: devices and platform may still be set, help is at once."""
    script = (
        "import sys, moejax; from moejax.cli.main import main; main(['--help']); "
        "main(['train', '--help']); from moejax import RunConfig, ConfigError; "
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules; "
        "assert moejax.train.__name__ == 'moejax.train' and callable(moejax.train); "
        "assert 'jax' in sys.modules and moejax.TrainResult._fields[0] == 'metrics'"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_overrides_stand_before_or_behind_a_space():
    rest, overrides = split_overrides(
        ["--config.model.dim=32", "--config.mesh.fsdp", "-1", "--config.log.progress", "--json",
         "--config.data.paths", "('a b.txt',)", "--config=tiny"]
    )  # fmt: skip
    assert rest == ["--json", "--config=tiny"]
    assert overrides == {
        "model.dim": "32", "mesh.fsdp": "-1", "log.progress": "true", "data.paths": "('a b.txt',)"
    }  # fmt: skip


def test_config_of_k3_on_128_devices(moejax):
    """The published counts and the whole table; one device holds 1/128 of what is split."""
    shown = moejax("config", "--config=kimi_k3", "--devices=128", "--params", "--sharding")
    assert shown.code == 0 and not shown.err
    assert "2,779,484,476,000" in shown.out and "104,189,612,640" in shown.out
    assert "fsdp=2 x expert=64 (128 devices" in shown.out
    row = next(r for r in shown.out.splitlines() if r.startswith("stack1.run1.ffn.experts.gate_up"))
    name, shape, dtype, *spec, size = row.split()
    assert (shape, dtype, " ".join(spec)) == (
        "22x3x896x3584x2x3072", "float32", "P(-, -, expert*fsdp)"
    )  # fmt: skip
    assert int(size.replace(",", "")) == 22 * 3 * 896 * 3584 * 2 * 3072 * 4 // 128


def test_config_as_json_agrees_with_itself(moejax):
    shown = moejax("config", "--config=tiny", "--json", "--config.model.num_layers=5")
    facts = json.loads(shown.out)
    assert facts["config"]["model"]["num_layers"] == 5
    assert facts["mesh"]["fsdp"] == 2 and facts["mesh"]["expert"] == 4
    sizes = [jax.ShapeDtypeStruct(tuple(a["shape"]), a["dtype"]).size for a in facts["sharding"]]
    counts = facts["parameters"]
    assert sum(sizes) == counts["total"] == sum(counts["by_part"].values())
    assert counts["active"] < counts["total"]
    assert sum(a["bytes_a_device"] for a in facts["sharding"]) == facts["bytes_a_device"]


def test_config_marks_what_differs_and_says_what_fields_mean(moejax):
    shown = moejax("config", "--fields", "--config=tiny", "--config.optim.lr=0.5").out
    assert re.search(r"^\*  optim\.lr=0\.5 +peak learning rate of matrices", shown, re.M)
    assert re.search(r"^   optim\.weight_decay=0\.1 +decoupled weight decay", shown, re.M)
    assert "parameters\n" not in shown


def test_eval_agrees_with_the_end_of_training(moejax, run_dir):
    """With the checkpoint's own config, without writing; JSON and text say the same."""
    before = sorted(run_dir.rglob("*"))
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    shown = moejax("eval", f"--workdir={run_dir}", "--json")
    assert shown.code == 0 and not shown.err
    facts = json.loads(shown.out)
    assert facts["step"] == 2 and facts["split"] == "validation"
    assert facts["loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert facts["nats_per_byte"] == pytest.approx(last["eval_nats_per_byte"], rel=1e-6)
    assert 0 < facts["num_tokens"] <= 2 * 8 * 31
    assert sorted(run_dir.rglob("*")) == before


def test_eval_of_another_split_step_and_mesh(moejax, run_dir):
    """A named step, the training split, a mesh that does not fit: said, and evaluated anyway."""
    wrong = moejax("eval", f"--workdir={run_dir}", "--step=7")
    assert wrong.code == 2 and "no checkpoint of step 7" in wrong.err
    shown = moejax(
        "eval", f"--checkpoint={run_dir}/checkpoints/2", "--split=train", "--config=tiny",
        *[f for f in flags() if "mesh" not in f],
    )  # fmt: skip
    assert shown.code == 0 and not shown.err  # tiny's own mesh fits the eight devices here
    assert re.match(
        r"step 2, train split: loss \d\.\d{4} a token, \d\.\d{4} nats a byte, over \d+ tokens "
        r"in rows of 32;",
        shown.out,
    )


def test_a_mesh_that_does_not_fit_falls_back_unless_asked_for():
    cfg = load_config("tiny", {"data.batch_size": 6, "train.accumulation": 3, "eval.batch_size": 0})
    fitted, note = fit_to_devices(cfg, 4, {})
    assert (fitted.mesh.fsdp, fitted.mesh.expert) == (-1, 1)
    assert fitted.eval.batch_size == 8, "rounded up to whole rows a device"
    assert "mesh fsdp=2 x expert=4 does not fit 4 devices" in note and "fsdp=4 instead" in note
    with pytest.raises(ConfigError, match="does not fit 4 devices"):
        fit_to_devices(cfg, 4, {"mesh.fsdp": "2"})
    same, note = fit_to_devices(cfg, 8, {})
    assert same.mesh == cfg.mesh and not note


def test_train_of_a_finished_run_says_so(moejax, run_dir):
    again = moejax("train", "--config=tiny", f"--workdir={run_dir}", *flags())
    assert again.code == 0 and f"{run_dir} is finished: step 2" in again.out
    placed = f"--config.placement.file={run_dir}/none.json"
    experts = "--config.model.ffn.num_dense_layers=0"
    wrong = moejax("train", "--config=tiny", f"--workdir={run_dir}", *flags(), placed, experts)
    assert wrong.code == 2 and "none.json cannot be read" in wrong.err and not wrong.out


def _damage(step: Path) -> None:
    """Flips a bit of the step's largest file."""
    victim = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_offered(moejax, run_dir, tmp_path):
    """By `eval`, and by `train` where the run counts as finished."""
    workdir = tmp_path / "work"
    shutil.copytree(run_dir, workdir)
    newest, before = workdir / "checkpoints" / "2", workdir / "checkpoints" / "1"
    shutil.copytree(newest, before)
    _damage(newest)
    for argv in (["eval"], ["train", "--config=tiny", *flags()]):
        refused = moejax(*argv, f"--workdir={workdir}")
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert f"checkpoint {newest} is damaged (file " in refused.err
        assert f"The previous one is {before}: delete 2 to use it." in refused.err


def test_eval_sees_the_rows_asked_for_however_they_are_batched(moejax, run_dir):
    """Six rows a batch are eight on eight devices; those added are empty."""
    loss, tokens = set(), set()
    for rows, batches in ((6, 2), (4, 3), (12, 1)):
        sizes = [f"--config.eval.batch_size={rows}", f"--config.eval.batches={batches}"]
        facts = json.loads(moejax("eval", f"--workdir={run_dir}", "--json", *sizes).out)
        tokens.add(facts["num_tokens"])
        loss.add(round(facts["loss"], 5))
    assert len(tokens) == len(loss) == 1 and 0 < tokens.pop() <= 12 * 31


def test_one_run_a_workdir(moejax, run_dir, tmp_path):
    """A second is refused in one line and changes nothing; kill -9 frees the workdir."""
    workdir = tmp_path / "work"
    shutil.copytree(run_dir, workdir)
    script = (
        "import pathlib, sys; from moejax.train.lock import sole_run\n"
        "with sole_run(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(workdir)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = sorted(workdir.rglob("*"))
        argv = ["train", "--config=tiny", f"--workdir={workdir}", *flags(train__num_steps=4)]
        refused = moejax(*argv)
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert f"workdir {workdir} is in use by process {holder.pid} on " in refused.err
        assert sorted(workdir.rglob("*")) == before
        holder.kill()
    with sole_run(workdir):
        assert (workdir / "run.lock").read_text().startswith(f"{os.getpid()} on ")
    assert not (workdir / "run.lock").exists()


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with sole_run(tmp_path / "work"), sole_run(tmp_path / "work"):
        pass
    assert not list(tmp_path.iterdir()), "the folder was made for the run, and stays empty"


def test_the_package_trains_from_any_form_of_config(run_dir):
    """`moejax.train` is the package and the function; here on a finished run, which is quick."""
    stored = json.loads((run_dir / "config.json").read_text())
    result = moejax.train(stored, run_dir)
    assert result.outcome == "finished before" and result.step == 2
    assert result.checkpoint == run_dir / "checkpoints" / "2"
    assert isinstance(result, moejax.TrainResult)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step": 2, **result.metrics} == last and last["eval_loss"] > 0
    with pytest.raises(moejax.ConfigError, match="nearest: model.dim"):
        moejax.train("tiny", run_dir, {"model.dims": 3})


def test_a_runs_folder_is_a_config(moejax, run_dir, tmp_path):
    """As is the config.json in it; both give the config as it was resolved."""
    stored = json.loads((run_dir / "config.json").read_text())
    for name in (run_dir, run_dir / "config.json"):
        shown = json.loads(moejax("config", f"--config={name}", "--json").out)
        assert shown["config"] == stored
    assert load_config(run_dir) == load_config("tiny", dict(split_overrides(flags())[1]))
    (tmp_path / "config.json").write_text("{")
    refused = moejax("config", f"--config={tmp_path}")
    assert refused.code == 2 and "config.json cannot be read as JSON" in refused.err


def test_a_platform_that_is_not_there_is_one_line(moejax, monkeypatch, tmp_path):
    """JAX says nothing but AssertionError, or much more."""
    monkeypatch.setenv("JAX_PLATFORMS", "")
    for error in (AssertionError(), RuntimeError("Unable to initialize backend\n 'cuda'.")):
        monkeypatch.setattr(jax, "devices", lambda error=error: (_ for _ in ()).throw(error))
        refused = moejax("train", "--config=tiny", "--platform=gpu", f"--workdir={tmp_path}/work")
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert refused.err.startswith("error: no devices of platform 'cuda': ")
    assert not list(tmp_path.iterdir())


def test_our_warnings_are_one_line(moejax, monkeypatch):
    def warn(argv):
        warnings.warn("two\nlines", stacklevel=1)
        warnings.warn_explicit("theirs", UserWarning, "/elsewhere.py", 7)
        warnings.warn_explicit("ours\ntoo", UserWarning, cli.__file__, 7)
        return 0

    monkeypatch.setattr(cli, "_dispatch", warn)
    with pytest.warns(UserWarning) as caught:
        shown = moejax("train")
    assert shown.err == "warning: ours too\n"
    assert [str(w.message) for w in caught] == ["two\nlines", "theirs"]


def test_a_compilation_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="compile_cache=.*Not a directory"):
        assert enable_cache(str(tmp_path / "file" / "below")) is None


def test_tokenizer_train_writes_a_file_the_config_can_name(moejax, tmp_path):
    out = tmp_path / "deep" / "tokenizer.json"
    source = ["--config.data.source=files", f"--config.data.paths=('{TEXT}/*.txt',)"]
    argv = ["tokenizer", "train", "--config=tiny", f"--out={out}", "--vocab-size=280", *source]
    shown = moejax(*argv)
    assert shown.code == 0 and f"{out}: 280 tokens" in shown.out
    first = out.read_bytes()
    assert moejax(*argv).code == 0 and out.read_bytes() == first, "the same text, the same file"
    assert list(out.parent.iterdir()) == [out]


def test_errors_are_told_apart(monkeypatch, capsys):
    """Disk full is one line; Ctrl-C is 130; a bug shows its traceback; MOEJAX_DEBUG shows all."""

    def fail(error):
        monkeypatch.setattr(cli, "_dispatch", lambda argv: (_ for _ in ()).throw(error))
        return cli.main(["train"])

    assert fail(OSError(28, "No space left on device", "runs/x")) == 2
    assert capsys.readouterr().err == "error: runs/x: No space left on device.\n"
    assert fail(ConfigError("two\nlines")) == 2
    assert capsys.readouterr().err == "error: two lines\n"
    assert fail(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    with pytest.raises(ValueError, match="not about a setting"):
        fail(ValueError("not about a setting"))
    monkeypatch.setenv("MOEJAX_DEBUG", "1")
    assert fail(ConfigError("wrong")) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("error: wrong\n")


def test_sigterm_saves_and_ends_with_its_code(tmp_path):
    """A process of its own, on two simulated devices, as a scheduler would stop it."""
    workdir = tmp_path / "work"
    argv = flags(train__num_steps=1_000_000, eval__every=0, checkpoint__every=0)
    process = _command("train", "--config=tiny", f"--workdir={workdir}", "--devices=2", *argv)
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM after step" in out and "2 devices (fsdp=2, simulated" in out
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert [int(p.name) for p in (workdir / "checkpoints").iterdir()] == [last]


def test_a_refusal_of_the_real_command_is_one_line():
    process = _command("train", "--config=tiny", "--workdir=none", "--config.model.dims=3")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and not out
    assert err == "error: unknown config field 'model.dims'; nearest: " + err.split("nearest: ")[1]
    assert err.count("\n") == 1 and "model.dim" in err and not (ROOT / "none").exists()


def test_a_reader_that_has_gone_is_no_error():
    process = _command("config", "--config=tiny")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 141 and not process.stderr.read()
