"""Configs by name, by file and from values; what is wrong with one is said in one line."""

import sys
import types
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from moejax.config import ConfigError, RunConfig
from moejax.config.load import as_run_config, load_config, shipped_folder

pytestmark = pytest.mark.quick

FILE = """
from configs import base

def get_config():
    c = base.get_config()
    c.model.dim = 48
    return c
"""


def _file(folder: Path, text: str, name: str = "mine.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _message(config, overrides=None) -> str:
    with pytest.raises(ConfigError) as caught:
        as_run_config(config, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_name_and_the_path_of_its_file_are_the_same_config():
    by_name = load_config("tiny")
    assert by_name == load_config(shipped_folder() / "tiny.py")
    assert (by_name.mesh.fsdp, by_name.mesh.expert) == (2, 4)


def test_overrides_are_read_as_the_field_says():
    cfg = load_config(
        "tiny",
        {
            "model.dim": "32",
            "optim.lr": "1e-3",
            "optim.clip_norm": "2",
            "model.tie_embeddings": "true",
            "data.paths": "('a.txt', 'b.txt')",
            "model.name": "7",
            "train.num_steps": 9,
            "optim.groups": "[('embed', 0.5, -1)]",
        },
    )
    assert (cfg.model.dim, cfg.optim.lr, cfg.optim.clip_norm) == (32, 1e-3, 2.0)
    assert cfg.model.tie_embeddings is True and cfg.model.name == "7"
    assert cfg.data.paths == ("a.txt", "b.txt") and cfg.train.num_steps == 9
    for text in ("q_proj,k_proj,gate", "('q_proj', 'k_proj', 'gate')", "q_proj,k_proj,gate,"):
        lora = load_config("tiny", {"lora.rank": "8", "lora.targets": text}).lora
        assert lora.targets == ("q_proj", "k_proj", "gate")
    assert load_config("tiny", {"lora.rank": 8, "lora.targets": "gate"}).lora.targets == ("gate",)
    assert cfg.optim.groups == (("embed", 0.5, -1),)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("model.moe.num_expert", "8", "nearest: model.moe.num_experts"),
        ("modle.dim", "8", "nearest: model.dim"),
        ("num_steps", "8", "nearest: train.num_steps"),
        ("model.moe", "8", "model.moe is a section"),
        ("model.dim", "wide", "model.dim='wide' is not a whole number"),
        ("model.dim", "1.5", "is not a whole number"),
        ("optim.lr", "fast", "is not a number"),
        ("log.progress", "maybe", "is not true or false"),
        ("data.paths", "(a.txt", "a Python tuple such as"),
        ("data.paths", "a.txt,,b.txt", "a list such as a,b"),
        ("data.seq_len", "1", "data.seq_len=1 is not allowed: it must be >= 2"),
        ("optim.lr", "nan", "optim.lr=nan is not allowed"),
        ("model.dim", 1.5, "has type float; it must be int"),
    ],
)
def test_a_wrong_field_is_one_line(name, value, says):
    assert says in _message("tiny", {name: value})


def test_every_form_of_a_config_gives_the_same(tmp_path):
    path = _file(tmp_path, FILE)
    from_file = load_config(str(path))
    assert from_file == RunConfig().replace(model=RunConfig().model.replace(dim=48))
    values = {"model": {"dim": 48}}
    for form in (values, ConfigDict(values), {"model": ConfigDict({"dim": 48})}, from_file):
        assert as_run_config(form) == from_file
    assert as_run_config(values, {"model.dim": 32}).model.dim == 32


def test_a_file_among_users_own_configs_finds_its_neighbours_and_the_shipped_base(tmp_path):
    folder = tmp_path / "configs"
    _file(folder, "WIDTH = 24\n", "widths.py")
    text = FILE.replace("import base", "import base, widths").replace("48", "widths.WIDTH")
    assert load_config(_file(folder, text)).model.dim == 24


def test_users_own_configs_package_stays_what_it_was(tmp_path, monkeypatch):
    mine, base = types.ModuleType("configs"), types.ModuleType("configs.base")
    monkeypatch.setitem(sys.modules, "configs", mine)
    monkeypatch.setitem(sys.modules, "configs.base", base)
    assert load_config(_file(tmp_path, FILE)).model.dim == 48
    assert sys.modules["configs"] is mine and sys.modules["configs.base"] is base


def test_a_package_on_the_path_gives_its_modules_but_not_its_base(tmp_path, monkeypatch):
    package = tmp_path / "project" / "configs"
    _file(package, "", "__init__.py")
    _file(package, "raise RuntimeError('another base')", "base.py")
    _file(package, "WIDTH = 40\n", "shared_widths.py")
    monkeypatch.syspath_prepend(str(package.parent))
    text = FILE.replace("import base", "import base, shared_widths")
    path = _file(tmp_path / "elsewhere", text.replace("48", "shared_widths.WIDTH"))
    assert load_config(path).model.dim == 40
    assert load_config("tiny").model.dim == 64


def test_loading_leaves_nothing_beside_the_file(tmp_path):
    path = _file(tmp_path / "configs", FILE)
    load_config(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def get_config():\n    return 1 / 0\n", "mine.py:2: ZeroDivisionError"),
        ("import no_such_module\n", "mine.py:1: ModuleNotFoundError"),
        ("def get_config(:\n", "mine.py:1: SyntaxError"),
        (FILE.replace("= 48", "= 'wide'"), "mine.py:6: TypeError"),
        (FILE.replace("c.model.dim", "c.modle.dim"), "mine.py:6: AttributeError"),
        (FILE.replace("c.model.dim", "c.model.dmi"), "nearest: model.dim"),
        ("raise SystemExit(3)\n", "mine.py:1: SystemExit"),
        ("x = 1\n", "has no function get_config()"),
        ("def get_config():\n    return 3\n", "returns int; it must be a ConfigDict"),
    ],
)
def test_an_error_inside_a_config_file_is_one_line(tmp_path, text, says):
    assert says in _message(str(_file(tmp_path, text)))


def test_no_such_config_lists_what_is_shipped(tmp_path):
    message = _message(str(tmp_path / "tinny.py"))
    assert "kimi_k3, kimi_k31" in message and "Did you mean tiny?" in message
    assert "is a folder" in _message(str(tmp_path))
    assert "not int" in _message(7)
