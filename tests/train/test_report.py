"""The commands that a run proposes can be pasted into the shell it was called from."""

from __future__ import annotations

import sys

import moejax
from moejax.config.load import load_config
from moejax.train.report import device_options, program_name
from tests.cli.conftest import SMALL


def test_the_program_is_called_as_the_shell_finds_it(tmp_path, monkeypatch):
    command = tmp_path / ".venv" / "bin" / "moejax"
    command.parent.mkdir(parents=True)
    command.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.chdir(tmp_path)
    assert program_name() == "./.venv/bin/moejax"
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    assert program_name() == str(command)
    monkeypatch.setenv("PATH", str(command.parent))
    assert program_name() == "moejax"
    monkeypatch.setattr(sys, "executable", "/some where/python")
    assert program_name() == "moejax"
    monkeypatch.setenv("PATH", "/none")
    assert program_name() == "'/some where/python' -m moejax.cli.main"


def test_simulated_devices_are_named():
    assert device_options() == ("--devices=8",)


def test_a_config_made_in_python_is_proposed_as_the_run_wrote_it(tmp_path, capsys):
    """It has no name that would bring it back."""
    workdir = tmp_path / "work"
    cfg = load_config("tiny", SMALL | {"train.num_steps": 1}).replace(seed=3)
    moejax.train(cfg, workdir)
    out = capsys.readouterr().out
    proposed = f"train --config={workdir}/config.json --workdir={workdir} --devices=8"
    assert f" {proposed} --config.train.num_steps=2\n" in out
    assert load_config(workdir / "config.json") == cfg
    assert not any(line.endswith(" ") for line in out.splitlines())
